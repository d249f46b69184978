"""Runs ``partsong serve``: checks what needs no model, then serves until it is interrupted."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

from partsong.cli.ranks import refuse_torchrun
from partsong.cli.serving_options import Serving
from partsong.errors import ArgumentError, UnsupportedError
from partsong.fork_server import begin_early

__all__ = ["serve", "summary"]

#: Characters that a key needs at least where others can reach the server.
_LEAST_KEY = 16


def serve(options: Serving) -> dict[str, Any]:
    """Serves until it is interrupted; returns nothing to report."""
    refuse_torchrun("partsong serve starts its own ranks")
    key = _key(options)
    if not options.model and options.upstream is None:
        raise ArgumentError("name a model to serve: --model NAME, or --upstream URL")
    try:
        import fastapi  # noqa: F401 - only to say early what is missing
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"{error}; install partsong[serve]") from error
    from partsong.serving.web import run_server

    run_server(_server(options, key), host=options.host, port=options.port)
    return {}


def summary(result: dict[str, Any]) -> str:
    """Returns nothing: a server has no result."""
    return ""


def _key(options: Serving) -> str | None:
    """Reads the key.

    Raises:
        ArgumentError: others could reach the server without one, or it is short or cannot be read.
    """
    key = os.environ.get("PARTSONG_API_KEY") or None
    if options.key_file is not None:
        try:
            key = Path(options.key_file).read_text().strip()
        except OSError as error:
            raise ArgumentError(f"--key-file {options.key_file} cannot be read: {error}") from error
    if key is not None and len(key) < _LEAST_KEY:
        raise ArgumentError(f"the key has {len(key)} characters; use at least {_LEAST_KEY}")
    if key is None and not _is_own(options.host):
        raise ArgumentError(
            f"--host {options.host} lets others reach the server, so it needs a key: give --key-file FILE, or set "
            "PARTSONG_API_KEY"
        )
    return key


def _is_own(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _server(options: Serving, key: str | None) -> Any:
    from partsong.serving.catalog import serves_pictures
    from partsong.serving.limits import Limits
    from partsong.serving.server import Server
    from partsong.serving.texts.local import LocalText
    from partsong.serving.texts.wire import TextSpec

    loras = _loras(options.lora)
    pictures = [name for name in options.model if serves_pictures(name)]
    models = _picture_models(options, pictures, loras)
    texts = [name for name in options.model if name not in pictures]
    if (options.strategy or loras) and not pictures:
        raise ArgumentError("--strategy and --lora are for models of pictures and videos, and none is served")
    return Server(
        models=models,
        texts={
            Path(name).name: LocalText(
                TextSpec(name=Path(name).name, model=name, dtype=options.dtype, threads=options.threads)
            )
            for name in texts
        },
        upstream=options.upstream,
        folder=_folder(options.folder),
        limits=Limits(
            pixels=options.max_pixels,
            frames=options.max_frames,
            steps=options.max_steps,
            waiting=options.max_waiting,
            kept_seconds=3600 * options.keep_hours,
        ),
        key=key,
    )


def _picture_models(options: Serving, names: list[str], loras: dict[str, Path]) -> list[Any]:
    """Describes the models of pictures and videos; the imports of their ranks begin beside those of the server."""
    from partsong.serving.catalog import picture_model

    nproc, settings = options.nproc or 1, {key: getattr(options, key) for key in ("dtype", "max_rows", "max_active")}
    models = [
        picture_model(
            name, nproc=nproc, strategies=options.strategy, loras=loras, threads=_threads(options, name), **settings
        )
        for name in names
    ]
    if names:
        begin_early(nproc, ["partsong.serving.ranks.loop"])
    return models


def _threads(options: Serving, name: str) -> int | None:
    from partsong import zoo

    # The threads of several processes compete for the cores, and a zoo model is too small to need them.
    return options.threads or (1 if (options.nproc or 1) > 1 or name in zoo.MODELS else None)


def _loras(given: tuple[str, ...]) -> dict[str, Path]:
    loras = {}
    for text in given:
        name, _, path = text.partition("=")
        if not (name.isidentifier() and path and Path(path).exists()):
            raise ArgumentError(f"--lora {text}: write NAME=FILE with a plain name and a file or folder that is there")
        loras[name] = Path(path)
    return loras


def _folder(given: str | None) -> Path:
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partsong" / "serve"
