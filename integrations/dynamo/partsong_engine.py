"""Serves a diffusers pipeline that several ranks draw with as one worker of NVIDIA Dynamo.

torchrun starts the ranks. The first one is the worker that Dynamo knows, and answers the requests of
``/v1/images/generations``. It tells the others what to draw, and all of them draw it together.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from dynamo.common.backend.engine import DiffusionEngine, EngineConfig
from dynamo.common.backend.health_check import build_raw_health_check_payload
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.llm import ModelInput

from partsong import ArgumentError, generate, load_pipeline, parse_strategy
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.pipelines import picture_arguments
from partsong.seeds import check_seed, generators

__all__ = ["PartsongEngine", "Ranks", "main", "read_options", "read_request"]

#: Pictures of one request, as Dynamo bounds them.
_MOST = 10
#: What Dynamo adds to the fields of OpenAI, and goes to the pipeline's call under the same name.
_EXTENSIONS = ("negative_prompt", "num_inference_steps", "guidance_scale")


def read_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; None takes that of this process."""
    parser = argparse.ArgumentParser(prog="partsong_engine", description="Serve pictures of several ranks to Dynamo.")
    parser.add_argument("--model", required=True, help="a folder of diffusers, a hub id, or a name of the zoo")
    parser.add_argument("--served-model-name", help="what requests call it; default: as --model")
    parser.add_argument("--strategy", action="append", default=[], help="NAME[:KEY=VALUE,...]; may be given again")
    parser.add_argument("--dtype", help="default: the checkpoint's own on a GPU, float32 on a CPU")
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--component", default="partsong")
    parser.add_argument("--endpoint", default="generate")
    parser.add_argument("--discovery-backend", default="etcd", choices=["kubernetes", "etcd", "file", "mem"])
    parser.add_argument("--request-plane", default="tcp")
    parser.add_argument("--event-plane")
    options = parser.parse_args(argv)
    options.served_model_name = options.served_model_name or options.model
    return options


def read_request(request: dict[str, Any]) -> dict[str, Any]:
    """Reads a request, Dynamo's ``NvCreateImageRequest``, as arguments of a pipeline, with ``num`` and ``seed``.

    Raises:
        ArgumentError: a field asks for what cannot be; Dynamo answers with status 400.
    """
    prompt, num, size = request.get("prompt"), request.get("n"), request.get("size")
    if not isinstance(prompt, str):
        raise ArgumentError(f"prompt is a text, found {prompt!r}")
    if request.get("input_reference") is not None:
        raise ArgumentError("input_reference: this worker draws from text alone; leave it out")
    if num not in (None, *range(1, _MOST + 1)):
        raise ArgumentError(f"n is a whole number from 1 to {_MOST}, found {num!r}")
    extensions = request.get("nvext") or {}
    seed = extensions.get("seed")
    seed = secrets.randbits(63) if seed is None else check_seed(seed)
    read = {"prompt": prompt, "num": int(num or 1), "seed": seed}
    if size not in (None, "auto"):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", str(size))
        if match is None:
            raise ArgumentError(f"size is WIDTHxHEIGHT in pixels, such as 1024x768, found {size!r}")
        read |= {"width": int(match[1]), "height": int(match[2])}
    return read | {name: extensions[name] for name in _EXTENSIONS if extensions.get(name) is not None}


class Ranks:
    """Holds this rank's part of the pipeline, and draws what the first rank asks for on all ranks together.

    Raises:
        PartsongError: the model cannot be loaded, or split so; all ranks refuse alike.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        quiet_libraries()
        strategies = [parse_strategy(text) for text in options.strategy]
        self.plan = load_pipeline(options.model, *strategies, dtype=options.dtype)
        self.plan.target.set_progress_bar_config(disable=True)
        # A request may be long in coming: its group waits longer than those of the strategies.
        years = timedelta(days=3650)
        self._group: Any = dist.new_group(backend="gloo", timeout=years) if dist.is_initialized() else None

    def share(self, asked: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns the first rank's request on every rank; None ends them."""
        held = [asked]
        if self._group is not None:
            dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]

    def draw(self, asked: dict[str, Any]) -> list[Any]:
        """Draws the pictures of one request; every rank does, and returns them."""
        others = {name: value for name, value in asked.items() if name not in ("num", "seed")}
        noise = generators(asked["seed"], asked["num"])
        return generate(self.plan, **picture_arguments(others, asked["prompt"], asked["num"], noise)).images

    def follow(self) -> None:
        """Draws what the first rank asks for until it ends."""
        while (asked := self.share(None)) is not None:
            # The first rank answers with the reason. All other errors end this rank, and with it the worker.
            with suppress(ValueError, TypeError):
                self.draw(asked)

    def lead(self, asked: dict[str, Any]) -> list[Any]:
        """Draws a request of the first rank, which the others draw too."""
        self.share(asked)
        return self.draw(asked)


class PartsongEngine(DiffusionEngine):
    """Answers Dynamo's requests for pictures, one after another, on all ranks that torchrun has started."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        # The pipeline stays in one thread, and requests wait for each other there.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="partsong")
        self._ranks: Ranks | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[PartsongEngine, WorkerConfig]:
        """Reads the command line, for Dynamo's ``run``."""
        options = read_options(argv)
        config = WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            endpoint=options.endpoint,
            model_name=options.model,
            served_model_name=options.served_model_name,
            model_input=ModelInput.Text,
            endpoint_types="images",
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
            enable_kv_routing=False,
        )
        return cls(options), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Loads the pipeline."""
        self._ranks = await self._call(Ranks, self._options)
        return EngineConfig(model=self._options.model, served_model_name=self._options.served_model_name)

    async def health_check_payload(self) -> dict[str, Any]:
        """Returns a request for one step of one picture: it is answered where all ranks are well."""
        return build_raw_health_check_payload({"prompt": "a circle", "nvext": {"num_inference_steps": 1, "seed": 0}})

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Answers one request; see `read_request`. Without a store for files, a URL holds the picture itself."""
        asked = read_request(request)
        assert self._ranks is not None, "Dynamo starts an engine before it sends requests"
        pictures = await self._call(self._ranks.lead, asked)
        holds = request.get("response_format") == "b64_json"
        name, scheme = ("b64_json", "") if holds else ("url", "data:image/png;base64,")
        yield {"created": int(time.time()), "data": [{name: scheme + _base64(picture)} for picture in pictures]}

    async def cleanup(self) -> None:
        """Ends the other ranks; a second call does nothing."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            await self._call(ranks.share, None)
        self._thread.shutdown()

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def _base64(picture: Any) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    """Serves on the first rank, and follows it on the others."""
    if os.environ.get("RANK", "0") == "0":
        run(PartsongEngine)
    else:
        Ranks(read_options()).follow()


if __name__ == "__main__":
    main()
