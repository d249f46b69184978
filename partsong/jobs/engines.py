"""Opens the engine that arguments name, and finds the function that extracts answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import Count, check_fields
from partsong.reasoning.answers.extract import final_choice, final_expression, final_math, final_number
from partsong.reasoning.answers.extract_code import final_code
from partsong.reasoning.answers.extract_rows import final_list
from partsong.reasoning.calls.answer import Extract
from partsong.reasoning.calls.engine import Engine

__all__ = ["EXTRACTORS", "EngineArguments", "extractor", "open_engine"]


def _whole(text: str) -> str | None:
    return text.strip() or None


#: Functions that find the answer in a text, so that equivalent answers count as one.
EXTRACTORS: Mapping[str, Extract] = MappingProxyType(
    {
        "number": final_number,
        "choice": final_choice,
        "expression": final_expression,
        "math": final_math,
        "code": final_code,
        "list": final_list,
        "text": _whole,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArguments:
    """Names the model that answers, and where it runs.

    Attributes:
        pretrained: what a `LocalEngine` loads: a folder, a zoo name, "smollm2-135m", a hub id, or a loaded model.
        base_url: address of a server with the OpenAI API, instead of `pretrained`; its key is read from the environment
            variable ``OPENAI_API_KEY``.
        model: the server's name for the model.
        endpoint: which endpoint of the server to ask.
        nproc: how many ranks share the model (see `RanksEngine`).
        share: how they share it, as text: "tensor-parallel", which is the default, or "sharded-weights".
        threads: of each of several ranks; one process takes the threads that torch is set to.
        num_engines: how many `LocalEngine`s to start on a Ray cluster (see `RayEngine`); None is one in this process.
        dtype: name of a torch type; None and "auto" leave the choice to the engine.
        device: None is the GPU if there is one.
        speculate: what guesses tokens ahead, as in `LocalEngine`.
        weights: rounds weights, as in `LocalEngine`.
    """

    pretrained: Any | None = None
    base_url: str | None = None
    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    nproc: Count = 1
    share: str | None = None
    threads: Count | None = None
    num_engines: Count | None = None
    dtype: str | None = None
    device: str | None = None
    speculate: tuple[str, ...] = ()
    weights: Literal["int8", "int4"] | None = None

    def validate(self) -> None:
        """Checks that the arguments name one model.

        Raises:
            ArgumentError: they name no model or two, or an argument belongs to another kind of engine.
        """
        check_fields(self)
        if (self.pretrained is None) == (self.base_url is None):
            raise ArgumentError(
                "name a model: pretrained= for one in this process, or base_url= and model= of a server"
            )
        server = self.base_url is not None
        if server and self.model is None:
            raise ArgumentError("base_url= needs model=, the name that the server has for the model")
        if server and (self.num_engines is not None or self.dtype not in (None, "auto")):
            raise ArgumentError("num_engines= and dtype= are for pretrained=; leave them out for a server")
        if (self.speculate or self.weights) and (server or self.num_engines is not None):
            raise ArgumentError("speculate= and weights= are for one model in this process; leave them out")
        if self.nproc > 1 and (server or self.num_engines is not None):
            raise ArgumentError("nproc= is for one model on this machine; leave it out")
        if self.share is not None and self.nproc == 1:
            raise ArgumentError("share= says how several ranks share the model; give nproc= as well")
        if not server and (self.model is not None or self.endpoint != "chat"):
            raise ArgumentError("model= and endpoint= are for a server with base_url=; leave them out for pretrained=")


def open_engine(arguments: EngineArguments) -> Engine:
    """Opens the engine.

    Raises:
        ArgumentError: the arguments contradict each other, or the model is not there.
        UnsupportedError: a package is missing.
    """
    arguments.validate()
    if arguments.base_url is not None:
        return _server(arguments)
    return _local(arguments) if arguments.num_engines is None else _cluster(arguments, arguments.num_engines)


def _local(arguments: EngineArguments) -> Engine:
    import torch

    from partsong.reasoning.local import LocalEngine

    name = None if arguments.dtype == "auto" else arguments.dtype
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"dtype={name!r}; use a floating type of torch such as 'bfloat16'")
    model: Any = arguments.pretrained
    how: dict[str, Any] = {"speculate": arguments.speculate, "weights": arguments.weights, "device": arguments.device}
    if arguments.nproc > 1:
        from partsong.reasoning.hosted import RanksEngine
        from partsong.samplers.registry import parse_strategy

        strategies = tuple(map(parse_strategy, filter(None, [arguments.share])))
        how |= {"nproc": arguments.nproc, "strategies": strategies, "threads": arguments.threads}
        return RanksEngine(model, dtype=dtype, **how)
    return LocalEngine(model, dtype=dtype, **how)


def _cluster(arguments: EngineArguments, num_engines: int) -> Engine:
    from partsong.reasoning.cluster import RayEngine

    dtype = None if arguments.dtype == "auto" else arguments.dtype
    return RayEngine(arguments.pretrained, num_engines=num_engines, dtype=dtype, device=arguments.device)


def _server(arguments: EngineArguments) -> Engine:
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("a server needs the openai client: pip install 'partsong[reasoning]'") from error
    from partsong.reasoning.remote import OpenAIEngine

    assert arguments.model is not None
    return OpenAIEngine(arguments.model, base_url=arguments.base_url, endpoint=arguments.endpoint)


def extractor(name: str | None, task: Any = None) -> tuple[str, Extract]:
    """Finds a function of `EXTRACTORS` by its name, with or without ``final_`` before it.

    Args:
        name: None is the function of the zoo model's task, or "number".
        task: as `task_of` returns it.

    Returns:
        The name and the function.

    Raises:
        ArgumentError: the name is unknown; lists the known ones.

    >>> extractor("final_choice")[1]("The answer is (B).")
    'B'
    """
    if name is None and task is not None:
        return "the model's own", task.answer_of
    plain = (name or "number").removeprefix("final_")
    if plain not in EXTRACTORS:
        raise ArgumentError(f"extract={name!r}; there are {', '.join(EXTRACTORS)}")
    return plain, EXTRACTORS[plain]
