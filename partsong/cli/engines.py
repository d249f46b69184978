"""Opens the engine that ``partsong think`` and ``partsong eval reasoning`` ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partsong.cli.options import Asking
from partsong.errors import ArgumentError
from partsong.foreign_messages import quiet_libraries

if TYPE_CHECKING:
    from partsong.cli.options import Think
    from partsong.cli.serving_options import Serving
    from partsong.reasoning.calls.engine import Engine
    from partsong.reasoning.scorers.verifier import VerifierAddress

__all__ = ["local_model", "make_engine", "verifier_address"]

#: The zoo's own model for thinking, used if nothing better is installed.
FALLBACK = "sums"


def local_model(options: Asking) -> str | None:
    """Names the model to load in this process, or returns None if a server runs it.

    By default it is SmolLM2-135M-Instruct if its package is installed, and otherwise the zoo's own small model.
    """
    if options.server is not None:
        return None
    from partsong.reasoning.local import smollm2

    return options.model or (smollm2.NAME if smollm2.installed() else FALLBACK)


def make_engine(options: Asking) -> Engine:
    """Opens an engine in this process, or one that asks a server.

    Raises:
        ArgumentError: an option belongs to the other kind of engine, or the model is not there.
        UnsupportedError: a package is missing.
    """
    _check(options)
    from partsong.jobs.engines import EngineArguments, open_engine

    if options.server is not None:
        return open_engine(EngineArguments(base_url=options.server, model=options.model, endpoint=options.endpoint))
    import torch

    from partsong import zoo

    quiet_libraries("transformers")
    model = local_model(options)
    threads = options.threads or (1 if model in zoo.MODELS else None)
    if threads is not None:
        torch.set_num_threads(threads)
    how: dict[str, Any] = {"speculate": options.speculate, "weights": options.weights, "device": options.device}
    how |= {"nproc": options.nproc or 1, "share": options.share, "threads": options.threads}
    return open_engine(EngineArguments(pretrained=model, dtype=options.dtype, **how))


def verifier_address(options: Think | Serving) -> VerifierAddress | None:
    """Returns where the model is that scores texts; None where none was named.

    Raises:
        ArgumentError: only one of address and model was given, the address cannot be used, or the kind is unknown.
    """
    url, model, kind = options.scorer, options.scorer_model, options.scorer_kind
    if url is None and model is None and kind is None:
        return None
    if url is None or model is None:
        raise ArgumentError("--scorer URL and --scorer-model NAME go together: where the model is, and which it is")
    from partsong.reasoning.remote.address import check_address
    from partsong.reasoning.scorers.reward_model import JUDGE, check_scorer_kind
    from partsong.reasoning.scorers.verifier import VerifierAddress

    check_scorer_kind(kind := kind or JUDGE)
    return VerifierAddress(base_url=check_address(url, has_key=False, plain_http=False), model=model, kind=kind)


def _check(options: Asking) -> None:
    if options.share is not None and (options.nproc or 1) == 1:
        raise ArgumentError("--share says how several ranks share the model; give --nproc as well")
    if options.server is None:
        if options.endpoint != "chat":
            raise ArgumentError("--endpoint belongs to a --server; a model in this process follows its chat template")
        return
    if options.model is None:
        raise ArgumentError("--server needs --model: the name under which the server has it")
    here = (options.dtype, options.device, options.threads, options.speculate or None, options.weights, options.nproc)
    if any(option is not None for option in (*here, options.share)):
        raise ArgumentError(
            "--dtype, --device, --threads, --speculate, --weights, --nproc and --share are for a model on this machine;"
            " leave them out"
        )
