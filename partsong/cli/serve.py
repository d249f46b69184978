"""Runs ``partsong serve``: checks what needs no model, then serves until it is interrupted."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from partsong.cli.config_file import ConfigFile
from partsong.cli.engines import verifier_address
from partsong.cli.ranks import is_main, num_ranks, refuse_torchrun, under_torchrun
from partsong.cli.serving_options import Serving
from partsong.errors import ArgumentError, UnsupportedError
from partsong.fork_server import begin_early
from partsong.parent import end_with_parent

__all__ = ["serve", "summary"]


def serve(options: Serving) -> dict[str, Any]:
    """Serves until it is interrupted; returns nothing to report."""
    if not options.model and options.upstream is None:
        raise ArgumentError("name a model to serve: --model NAME, or --upstream URL")
    try:
        import fastapi  # noqa: F401 - only to say early what is missing
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"{error}; install partsong[serve]") from error
    users = _users(options)
    if options.cluster is not None or options.replicas is not None:
        refuse_torchrun("--cluster and --replicas start ranks, and torchrun has started them")
    if under_torchrun():
        _serve_on_ranks(options, users)
        return {}
    from partsong.serving.web import run_server

    run_server(_server(options, users), _web(options))
    return {}


def _serve_on_ranks(options: Serving, users: dict[str, Any]) -> None:
    """Serves with the ranks that torchrun started, on one or several machines; the first is also the web server."""
    from partsong.serving.catalog import picture_model, serves_pictures

    if len(options.model) != 1 or not serves_pictures(options.model[0]):
        raise ArgumentError(f"torchrun's ranks serve one model of pictures or videos, not {options.model}")
    nproc = num_ranks(options.nproc)
    # torchrun ends its processes when it is asked to end, but not when it is killed; a server would outlive it then.
    end_with_parent()
    if is_main():
        from partsong.serving.web import run_beside_rank

        run_beside_rank(_server(replace(options, nproc=nproc), users), _web(options))
        return
    from partsong.serving.ranks.loop import serve_ranks

    # Only the first rank needs to know the default strategies.
    model = picture_model(
        options.model[0],
        nproc=nproc,
        strategies=("serial",),
        loras=_loras(options.lora),
        threads=_threads(replace(options, nproc=nproc), options.model[0]),
        **_settings(options),
    )
    serve_ranks(model.settings)


def summary(result: dict[str, Any]) -> str:
    """Returns nothing: a server has no result."""
    return ""


def _users(options: Serving) -> dict[str, Any]:
    """Returns the users by their keys.

    Raises:
        ArgumentError: others could reach the server without a key, or one is short or cannot be read.
    """
    from partsong.serving.access.user_tables import read_users
    from partsong.serving.access.users import OPERATOR, check_key

    users: dict[str, Any] = {}
    if options.config is not None:
        config = ConfigFile.read(options.config)
        users = read_users(config.users, config.folder)
    key = os.environ.get("PARTSONG_API_KEY") or None
    if options.key_file is not None:
        try:
            key = Path(options.key_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"--key-file {options.key_file} cannot be read as text: {error}") from error
    if key is not None:
        users[check_key(key, "the key")] = OPERATOR
    if not users and not _is_own(options.host):
        raise ArgumentError(
            f"--host {options.host} lets others reach the server, so it needs a key: give --key-file FILE, set "
            "PARTSONG_API_KEY, or write users into --config FILE"
        )
    return users


def _web(options: Serving) -> Any:
    from partsong.serving.web import WebSettings

    return WebSettings(
        host=options.host,
        port=options.port,
        grace=options.grace,
        root_path=_root_path(options.root_path),
        logs_json=options.log_format == "json",
    )


def _root_path(given: str) -> str:
    if given and not given.startswith("/"):
        raise ArgumentError(f"--root-path {given}: begin it with a slash, such as /pictures")
    return given.rstrip("/")


def _is_own(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _server(options: Serving, users: dict[str, Any]) -> Any:
    from partsong.serving.access.users import Users
    from partsong.serving.catalog import serves_pictures
    from partsong.serving.limits import Limits
    from partsong.serving.served_names import ServedNames
    from partsong.serving.server import Server

    loras = _loras(options.lora)
    pictures = [name for name in options.model if serves_pictures(name)]
    models = _picture_models(options, pictures, loras)
    texts = [name for name in options.model if name not in pictures]
    for_pictures = (options.strategy, loras, options.cluster, options.replicas)
    if any(for_pictures) and not pictures:
        names = "--strategy, --lora, --cluster and --replicas"
        raise ArgumentError(f"{names} are for models of pictures and videos, and none is served")
    server = Server(
        models=models,
        runner=_runner(options, len(pictures)),
        num_replicas=options.replicas or 1,
        texts=_texts(options, texts),
        upstream=options.upstream,
        verifier=verifier_address(options),
        served_names=ServedNames.read(options.served_name),
        folder=_folder(options.folder),
        outputs=_outputs(options),
        limits=Limits(
            pixels=options.max_pixels,
            frames=options.max_frames,
            steps=options.max_steps,
            waiting=options.max_waiting,
            kept_seconds=3600 * options.keep_hours,
        ),
        users=Users(users),
    )
    if options.upstream is None:  # what another server has is known once it is asked
        server.served_names.check([model.name for model in models], server.texts)
    return server


def _texts(options: Serving, names: list[str]) -> Any:
    from partsong.serving.texts.local import LocalText
    from partsong.serving.texts.wire import TextSpec

    how: Any = {"dtype": options.dtype, "threads": options.threads}
    how |= {"nproc": options.text_nproc or 1, "share": options.share, "verifier": verifier_address(options)}
    if (options.share or options.text_nproc) and not names:
        raise ArgumentError("--text-nproc and --share are for language models, and none is served")
    if options.share is not None and how["nproc"] == 1:
        raise ArgumentError("--share says how several ranks share a model; give --text-nproc as well")
    return {Path(name).name: LocalText(TextSpec(name=Path(name).name, model=name, **how)) for name in names}


def _runner(options: Serving, num_models: int) -> Any:
    """Returns the runner of the ranks; connects to the cluster if one is asked for."""
    from partsong.serving.runners import LOCAL

    if options.cluster is not None:
        from partsong.serving.ray_ranks import ray_runner

        ranks = num_models * (options.nproc or 1) * (options.replicas or 1)
        return ray_runner(options.ray_address, ranks=ranks, threads=options.threads)
    if options.ray_address is not None:
        raise ArgumentError("--ray-address goes with --cluster ray; give both or neither")
    return LOCAL


def _settings(options: Serving) -> dict[str, Any]:
    memory = None if options.memory is None else 1e9 * options.memory
    return {"dtype": options.dtype, "max_rows": options.max_rows, "max_active": options.max_active, "memory": memory}


def _picture_models(options: Serving, names: list[str], loras: dict[str, Path]) -> list[Any]:
    """Describes the models of pictures and videos; their ranks start importing at the same time as the server."""
    from partsong.serving.catalog import picture_model

    nproc, settings = options.nproc or 1, _settings(options)
    models = [
        picture_model(
            name, nproc=nproc, strategies=options.strategy, loras=loras, threads=_threads(options, name), **settings
        )
        for name in names
    ]
    if names and options.cluster is None and not under_torchrun():
        begin_early(nproc * (options.replicas or 1), ["partsong.serving.ranks.loop"])
    return models


def _threads(options: Serving, name: str) -> int | None:
    from partsong import zoo

    # The threads of several processes compete for the cores, and a zoo model is too small to need them.
    alone = (options.nproc or 1) * (options.replicas or 1) == 1 and options.cluster is None
    return options.threads or (None if alone and name not in zoo.MODELS else 1)


def _loras(given: tuple[str, ...]) -> dict[str, Path]:
    loras = {}
    for text in given:
        name, _, path = text.partition("=")
        if not (name.isidentifier() and path and Path(path).exists()):
            raise ArgumentError(f"--lora {text}: write NAME=FILE with a plain name and a file or folder that is there")
        loras[name] = Path(path)
    return loras


def _outputs(options: Serving) -> Any:
    from partsong.serving.operating.outputs import DailyOutputs

    if options.outputs is None:
        if options.outputs_days is not None:
            raise ArgumentError("--outputs-days goes with --outputs DIR; give both or neither")
        return None
    return DailyOutputs(Path(options.outputs), options.outputs_days)


def _folder(given: str | None) -> Path:
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partsong" / "serve"
