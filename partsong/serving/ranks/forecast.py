"""Predicts the memory of jobs, with the planner, on a replica's first rank, and refuses those that cannot fit."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partsong.accelerator import is_on_host, total_memory
from partsong.errors import ArgumentError, PartsongError
from partsong.parallel import Mesh
from partsong.planner.calls import Size
from partsong.planner.decoding import SIDE, decoding_of
from partsong.planner.memory import RESERVED
from partsong.planner.pipeline import default_sizes, downscale_of
from partsong.planner.steps import Tracer
from partsong.planner.subject import Subject
from partsong.samplers.registry import ParallelVae, parse_strategy
from partsong.serving.messages import JobMemory, JobWork
from partsong.serving.ranks.served_model import ServedModel
from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["MemoryForecast", "forecast_for", "room_per_rank"]

_log = logging.getLogger(__name__)

#: Errors that reading or tracing may raise for a model that the planner does not know.
_UNKNOWN = (PartsongError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)
#: Latent frames of two short clips, from which the memory of a longer one is extrapolated.
_CLIPS = (3, 6)
#: Strategies that reduce each rank's memory, suggested where a smaller request would not be the same picture.
_SAVING = ("tensor-parallel", "sharded-weights", "ulysses")


class MemoryForecast:
    """Predicts what a rank holds while it makes a job: its weights, and the tensors of the job at their peak.

    The planner traces one call of the denoiser, of the size that the pipeline makes by itself, for each mix of
    strategies once. From there on, the memory of a call and of decoding grows with pixels, frames and
    pictures. It works on copies without values, so it can be used from another thread than the one that samples.

    Args:
        model: before anything is attached to it.
        mesh: all ranks.
        arguments: of the denoiser's first call, of one picture or video with the model's defaults.
        calls: how many of them a step makes.
        room: bytes that a rank may take.
    """

    def __init__(self, model: ServedModel, mesh: Mesh, arguments: Mapping[str, Any], calls: int, room: int) -> None:
        self.room = room
        pipe, vae = model.pipe, getattr(model.pipe, "vae", None)
        sizes = {**default_sizes(pipe), **{key: value for key, value in model.defaults.items() if value is not None}}
        self._height, self._width, self._frames = sizes["height"], sizes["width"], sizes["num_frames"]
        self._makes_videos, self._factor = model.makes_videos, downscale_of(pipe)
        self._ranks, self._vae = mesh.world_size, None if vae is None else _without_numbers(vae)
        settings = {} if vae is None else vae.config
        self._channels = 0 if vae is None else int(settings.get("latent_channels") or settings["z_dim"])
        inputs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, dict(arguments))
        denoiser = model.denoiser
        rows = len(arguments[model.sample])
        dtype = next(denoiser.parameters()).dtype
        self._subject = Subject(
            name=type(pipe).__name__,
            denoiser=_without_numbers(denoiser),
            call=lambda size: inputs,
            steps=1,
            height=self._height,
            width=self._width,
            frames=self._frames,
            branches=rows if calls == 1 else calls,
            joined=calls == 1,
            dtype=dtype,
        )
        size = Size(height=self._height, width=self._width, frames=self._frames, dtype=dtype)
        self._tracer = Tracer(self._subject, size, fused=not is_on_host(mesh.device))
        parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
        self._beside = sum(_bytes(part) for part in parts if part is not denoiser)
        self._whole = _bytes(denoiser)
        self._traced: dict[tuple[str, ...], tuple[int, int] | None] = {}
        self._decoder: tuple[float, float] | None = None

    def of(self, work: JobWork) -> JobMemory:
        """Returns the bytes that the fullest rank needs for a job; zeros where they cannot be predicted."""
        if (traced := self._trace(work.strategies)) is None:
            return JobMemory()
        weights, working = traced
        height, width, frames = self._size(work)
        grown = height * width * frames / (self._height * self._width * self._frames)
        decoding = self._decoding(work.strategies, height * width, frames)
        return JobMemory(weights=weights, working=int(work.num * max(grown * working, decoding)))

    def check(self, work: JobWork) -> None:
        """Refuses a job that no rank can hold.

        Raises:
            ArgumentError: says what it needs, what there is, and what would fit.
        """
        memory = self.of(work)
        if memory.total <= self.room:
            return
        height, width, frames = self._size(work)
        of = f"{work.num} of {width}x{height}" if not self._makes_videos else f"{frames} frames of {width}x{height}"
        raise ArgumentError(
            f"{of} need {_giga(memory.total)} GB on a rank ({_giga(memory.weights)} GB of weights, "
            f"{_giga(memory.working)} GB beside them), and a rank has {_giga(self.room)} GB here; "
            f"{self._advice(work, memory)}"
        )

    def _advice(self, work: JobWork, memory: JobMemory) -> str:
        """Says what would fit instead."""
        left = self.room - memory.weights
        fitting = []
        if (num := int(left * work.num // memory.working)) >= 1:
            fitting.append(f"n={num}")
        elif (share := left * work.num / memory.working) > 0:
            height, width, _ = self._size(work)
            step = 2 * self._factor
            sides = [int(side * share**0.5 // step * step) for side in (width, height)]
            if min(sides) > 0:
                fitting.append(f"size {sides[0]}x{sides[1]}" + (" and n=1" if work.num > 1 else ""))
        for name in _SAVING if self._ranks > 1 else ():
            other = replace(work, strategies=(name,))
            if name not in work.strategies and 0 < self.of(other).total <= self.room:
                fitting.append(f"strategy {name}")
                break
        return f"ask for {' or '.join(fitting)}" if fitting else "serve it with more ranks or memory"

    def _size(self, work: JobWork) -> tuple[int, int, int]:
        height, width = work.arguments.get("height") or self._height, work.arguments.get("width") or self._width
        frames = (work.num_frames or work.arguments.get("num_frames") or self._frames) if self._makes_videos else 1
        if any(parse_strategy(name).has_loop for name in work.strategies):  # it makes a long video piece by piece
            frames = min(frames, self._frames)
        return height, width, frames

    def _trace(self, names: tuple[str, ...]) -> tuple[int, int] | None:
        """Returns bytes of weights, and of a call of the denoiser; None where the planner cannot predict them."""
        if names not in self._traced:
            ranks = self._ranks if names else 1
            mix = [strategy for strategy in map(parse_strategy, names) if strategy.denoises]
            try:
                steps = self._tracer.trace(mix, ranks, 1)
                share = steps.weights / max(1, sum(weight.nbytes for weight in self._subject.denoiser.parameters()))
                self._traced[names] = int(self._beside + self._whole * share), steps.working
            except _UNKNOWN as error:
                _log.info("the memory of %s under %s is not predicted: %s", self._subject.name, names, error)
                self._traced[names] = None
        return self._traced[names]

    def _decoding(self, names: tuple[str, ...], pixels: int, frames: int) -> int:
        """Returns the bytes that the first rank holds while it decodes, by itself unless `ParallelVae` is used.

        Args:
            names: the strategies.
            pixels: of a frame.
            frames: their number.
        """
        if self._vae is None:
            return 0
        if self._decoder is None:
            self._decoder = self._trace_decoder(self._vae)
        once, each = self._decoder
        shared = any(isinstance(parse_strategy(name), ParallelVae) for name in names)
        return int(pixels * (once + each * frames) / (self._ranks if shared else 1))

    def _trace_decoder(self, vae: Any) -> tuple[float, float]:
        """Returns the bytes for each pixel of a frame: once, and for each frame.

        Some autoencoders decode a video piece by piece, so most of the memory does not grow with the frames.
        """
        if self._frames == 1:
            return 0.0, decoding_of(vae, self._channels, None).peak
        short, long = (decoding_of(vae, self._channels, clip) for clip in _CLIPS)
        ends = [(cost.peak * cost.pixels, cost.pixels) for cost in (short, long)]
        each = max(0.0, (ends[1][0] - ends[0][0]) / (ends[1][1] - ends[0][1]))
        area = (SIDE * self._factor) ** 2  # pixels of one frame of what was traced
        return max(0.0, ends[0][0] - each * ends[0][1]) / area, each


def forecast_for(
    settings: ReplicaSettings, model: ServedModel, mesh: Mesh, arguments: Mapping[str, Any], calls: int
) -> MemoryForecast | None:
    """Returns a forecast; None for a model whose parts cannot be copied without their values.

    Args:
        settings: say how much a rank may take.
        model: before anything is attached to it.
        mesh: all ranks.
        arguments: of the denoiser's first call, of one picture or video with the model's defaults.
        calls: how many of them a step makes.
    """
    try:
        return MemoryForecast(model, mesh, arguments, calls, room_per_rank(settings, mesh))
    except _UNKNOWN as error:
        _log.info("the memory of %s is not predicted: %s", settings.pipeline, error)
        return None


def room_per_rank(settings: ReplicaSettings, mesh: Mesh) -> int:
    """Returns the bytes that a rank may take.

    It is what the settings say, or an equal share of the memory of the GPU or the machine for each rank on it, less
    what libraries and a fragmented allocator take.
    """
    if settings.memory is not None:
        return int(settings.memory)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size)) * settings.replicas_here
    sharers = here if is_on_host(mesh.device) else -(-here // torch.accelerator.device_count())
    return int(total_memory(mesh.device) / sharers * (1 - RESERVED))


def _without_numbers(module: nn.Module) -> Any:
    """Copies a module whose weights have shapes only."""
    held: dict[int, Any] = {}
    for weight in module.parameters():
        held[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    for buffer in module.buffers():
        held[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, held).eval()


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _giga(number: int) -> str:
    return f"{number / 1e9:.3g}"
