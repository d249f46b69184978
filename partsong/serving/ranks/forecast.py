"""Predicts the memory of jobs on a replica's first rank, and refuses those that cannot be made or cannot fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partsong.accelerator import is_on_host, total_memory
from partsong.errors import PartsongError
from partsong.parallel import Mesh
from partsong.planner.decoding import SIDE, decoding_of
from partsong.planner.memory import RESERVED
from partsong.planner.pipeline import downscale_of
from partsong.planner.subject import Subject
from partsong.samplers.registry import ParallelVae, parse_strategy
from partsong.serving.errors import CannotMakeError
from partsong.serving.messages import JobMemory, JobWork
from partsong.serving.ranks.first_step import FirstStep
from partsong.serving.ranks.reach import Asked, Reach
from partsong.serving.ranks.served_model import ServedModel
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.ranks.shape_calls import ShapeCalls, usual_call, without_numbers
from partsong.serving.ranks.traced_sizes import TracedSizes

__all__ = ["MemoryForecast", "forecast_for", "room_per_rank"]

_log = logging.getLogger(__name__)

#: Errors that reading or tracing may raise for a model that the planner does not know.
_UNKNOWN = (PartsongError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)
#: Latent frames of two short clips, from which the memory of a longer one is extrapolated.
_CLIPS = (3, 6)
#: Strategies that reduce each rank's memory, suggested where a smaller request would not be the same picture.
_SAVING = ("tensor-parallel", "sharded-weights", "ulysses")


class MemoryForecast:
    """Predicts what a rank holds while it makes a job, and refuses what the model cannot make or no rank can hold.

    The planner traces one call of the denoiser for each size and each mix of strategies once, where the pipeline can be
    called in shapes; otherwise one of the usual size, from which memory grows with pixels and frames. Decoding grows
    with them, and everything with the number of pictures. All works on copies without values, so it can be used from
    another thread than the one that samples.

    Args:
        settings: what is served.
        model: before anything is attached to it.
        mesh: all ranks.
        first: a step with the model's defaults.
        room: bytes that a rank may take.
    """

    def __init__(self, settings: ReplicaSettings, model: ServedModel, mesh: Mesh, first: FirstStep, room: int) -> None:
        assert first.arguments is not None
        self.room, self._name = room, settings.zoo_name or settings.folder.name
        pipe, vae, denoiser = model.pipe, getattr(model.pipe, "vae", None), model.denoiser
        self._usual = usual_call(model)
        self._makes_videos, self._factor = model.makes_videos, downscale_of(pipe)
        self._ranks, self._vae = mesh.world_size, None if vae is None else without_numbers(vae)
        settings_of_vae = {} if vae is None else vae.config
        self._channels = 0 if vae is None else int(settings_of_vae.get("latent_channels") or settings_of_vae["z_dim"])
        inputs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, first.arguments)
        joined, bare = first.calls == 1, without_numbers(denoiser)
        subject = Subject(
            name=type(pipe).__name__,
            build=lambda: bare,
            call=lambda size: inputs,
            steps=1,
            height=self._usual.height,
            width=self._usual.width,
            frames=self._usual.frames,
            branches=len(first.arguments[model.sample]) if joined else first.calls,
            joined=joined,
            dtype=next(denoiser.parameters()).dtype,
        )
        calls = None if first.encoded is None else ShapeCalls(model, bare, first.encoded)
        self._sizes = TracedSizes(subject, self._usual, calls, self._ranks, fused=not is_on_host(mesh.device))
        self._reach = Reach(self._name, self._usual, self._factor, self._sizes.failure)
        parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
        self._beside = sum(_bytes(part) for part in parts if part is not denoiser)
        self._whole, self._bare = _bytes(denoiser), bare
        self._decoder: tuple[float, float] | None = None

    @property
    def knows_sizes(self) -> bool:
        """Says whether any size can be tried, and not only the usual one."""
        return self._sizes.knows_all

    def of(self, work: JobWork) -> JobMemory:
        """Returns the bytes that the fullest rank needs for a job; zeros where they cannot be predicted."""
        asked, usual = self._asked(work)._replace(steps=self._usual.steps), self._usual
        steps = self._sizes.trace(work.strategies, asked if self._sizes.knows_all else usual)
        if steps is None:
            return JobMemory()
        pixels = asked.height * asked.width
        grown = 1.0 if self._sizes.knows_all else pixels * asked.frames / (usual.height * usual.width * usual.frames)
        share = steps.weights / max(1, sum(weight.nbytes for weight in self._bare.parameters()))
        decoding = self._decoding(work.strategies, pixels, asked.frames)
        working = int(work.num * max(grown * steps.working, decoding))
        return JobMemory(weights=int(self._beside + self._whole * share), working=working)

    def check(self, work: JobWork) -> None:
        """Refuses a job that the model cannot make, or that no rank can hold.

        Raises:
            CannotMakeError: says what was asked, what there is, and what would do.
        """
        asked = self._asked(work)
        self._reach.check(asked)
        if (refusal := self._sizes.refusal(work.strategies, asked)) is not None:
            raise CannotMakeError(f"{refusal} (at size {asked.size}; {self._usual.size} works)", "strategy")
        memory = self.of(work)
        if memory.total > self.room:
            of = f"{work.num} of {asked.size}" if not self._makes_videos else f"{asked.frames} frames of {asked.size}"
            raise CannotMakeError(
                f"{of} need {_giga(memory.total)} GB on a rank ({_giga(memory.weights)} GB of weights, "
                f"{_giga(memory.working)} GB beside them), and a rank has {_giga(self.room)} GB here; "
                f"{self._advice(work, memory)}",
                "size" if work.num == 1 else "n",
            )

    def _advice(self, work: JobWork, memory: JobMemory) -> str:
        """Says what would fit instead."""
        left = self.room - memory.weights
        fitting = []
        if (num := int(left * work.num // memory.working)) >= 1:
            fitting.append(f"n={num}")
        elif left > 0:
            fitting += self._smaller(work, left * work.num / memory.working)
        for name in _SAVING if self._ranks > 1 else ():
            other = replace(work, strategies=(name,))
            if name not in work.strategies and 0 < self.of(other).total <= self.room:
                fitting.append(f"strategy {name}")
                break
        return f"ask for {' or '.join(fitting)}" if fitting else "serve it with more ranks or memory"

    def _smaller(self, work: JobWork, share: float) -> Iterator[str]:
        """Yields the number of frames, and the size, that would fit: about a share of what was asked, or less."""
        asked = self._asked(work)
        step = max(2 * self._factor, self._reach.unit(asked))
        parts = (share**0.5, share, share / 2, share / 4)  # the first where attention takes most
        for part in parts if asked.frames > 1 else ():
            frames = int(asked.frames * part)
            if frames and self._fits(replace(work, num_frames=frames, num=1)):
                yield f"num_frames={frames}"
                break
        for part in parts:
            width, height = (int(side * part**0.5 // step * step) for side in (asked.width, asked.height))
            sides = {"height": height, "width": width}
            if min(height, width) and self._fits(replace(work, arguments={**work.arguments, **sides}, num=1)):
                yield f"size {width}x{height}" + (" and n=1" if work.num > 1 else "")
                return

    def _fits(self, work: JobWork) -> bool:
        return self._sizes.failure(self._asked(work)) is None and 0 < self.of(work).total <= self.room

    def _asked(self, work: JobWork) -> Asked:
        given, usual = work.arguments, self._usual
        frames = (work.num_frames or given.get("num_frames") or usual.frames) if self._makes_videos else 1
        in_pieces = any(parse_strategy(name).has_loop for name in work.strategies)
        return Asked(
            given.get("height") or usual.height,
            given.get("width") or usual.width,
            # A strategy with a loop of its own makes a long video piece by piece.
            min(frames, usual.frames) if in_pieces else frames,
            given.get("num_inference_steps") or usual.steps,
        )

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
        if self._usual.frames == 1:
            return 0.0, decoding_of(vae, self._channels, None).peak
        short, long = (decoding_of(vae, self._channels, clip) for clip in _CLIPS)
        ends = [(cost.peak * cost.pixels, cost.pixels) for cost in (short, long)]
        each = max(0.0, (ends[1][0] - ends[0][0]) / (ends[1][1] - ends[0][1]))
        area = (SIDE * self._factor) ** 2  # pixels of one frame of what was traced
        return max(0.0, ends[0][0] - each * ends[0][1]) / area, each


def forecast_for(settings: ReplicaSettings, model: ServedModel, mesh: Mesh, first: FirstStep) -> MemoryForecast | None:
    """Returns a forecast; None for a model whose parts cannot be copied without their values.

    Args:
        settings: what is served, and how much a rank may take.
        model: before anything is attached to it.
        mesh: all ranks.
        first: a step with the model's defaults.
    """
    try:
        return MemoryForecast(settings, model, mesh, first, room_per_rank(settings, mesh))
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


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _giga(number: int) -> str:
    return f"{number / 1e9:.3g}"
