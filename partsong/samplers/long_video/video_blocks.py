"""A long video as calls of a pipeline, one per block of frames: each is the pipeline's own loop on its own latents."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from partsong import seeds
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import Plan
from partsong.samplers.long_video.causal_block import causal_block
from partsong.samplers.long_video.frame_noise import FrameNoise, draw_seeds
from partsong.samplers.long_video.video_decode import StreamingDecoder
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from partsong.samplers.pipeline.scheduler_state import restore
from partsong.samplers.pipeline.shared_text import SharedText

__all__ = ["VideoBlocks", "frames_of", "joined"]

#: Names under which pipelines keep how many frames of video a latent frame stands for.
_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")


class VideoBlocks:
    """The blocks of one video.

    Args:
        plan: strategies on a video pipeline.
        arguments: the pipeline's own, for the whole video.
        frames: latent frames of a block.
        context: frames of the block before that a block sees.
        noise: see `FrameNoise`.
        frames_dim: dim of the frames in the pipeline's latents.
        decodes: whether this rank makes pictures of the latents.

    Attributes:
        sizes: latent frames of every block.
        factor: frames of video that a latent frame stands for.
        latents: those that the block opened last begins with.
        drawn: the seeds.
        decodes: whether this rank makes pictures.

    Raises:
        ArgumentError: a number of frames that the autoencoder cannot make.
        UnsupportedError: a pipeline whose video cannot be cut.
    """

    def __init__(
        self,
        plan: Plan,
        arguments: Mapping[str, Any],
        *,
        frames: int,
        context: int,
        noise: str,
        frames_dim: int,
        decodes: bool,
    ) -> None:
        self.pipe, self.arguments, self.dim = plan.target, dict(arguments), frames_dim
        self.factor = _factor(self.pipe)
        self.sizes = _cut(_latent_frames(self.pipe, self.arguments, self.factor), frames)
        self.name = next(name for name, part in self.pipe.components.items() if part is plan.denoisers[0].module)
        self._given = self.arguments.pop("latents", None)
        self._check_given()
        self.drawn = draw_seeds(self.arguments.get("generator"))
        self._noise = FrameNoise(self.drawn, frames=frames, context=context, kind=noise)
        self._text = SharedText()
        is_latent = self.arguments.get("output_type") == "latent"
        self._sample = plan.denoisers[0].adapter.sample
        self._decoder = StreamingDecoder(self.pipe.vae) if decodes and not is_latent else None
        self.decodes = decodes
        self.latents = torch.empty(0)

    def _check_given(self) -> None:
        if self._given is not None and self._given.shape[self.dim] != sum(self.sizes):
            raise ArgumentError(
                f"latents of shape {list(self._given.shape)} were given, with {self._given.shape[self.dim]} frames; "
                f"the video has {sum(self.sizes)} latent frames"
            )

    def close(self) -> None:
        """Ends what is kept for decoding."""
        if self._decoder is not None:
            self._decoder.close()

    def open(self, block: int) -> PausedCall:
        """The call of a block, not begun."""
        chosen = dict(self.arguments)
        chosen["num_frames"] = (self.sizes[block] - 1) * self.factor + 1
        chosen["generator"] = self._generators(block)
        if self._given is not None:
            chosen["latents"] = self._given.narrow(self.dim, sum(self.sizes[:block]), self.sizes[block])
        call = PausedCall(self.pipe, self.name, chosen, decodes=self.decodes)
        if hasattr(call.pipe, "set_progress_bar_config"):
            call.pipe.set_progress_bar_config(disable=True)
        self._text.join(call)
        vars(call.pipe)["prepare_latents"] = self._prepare(call.pipe.prepare_latents, block)
        if self._decoder is not None:
            call.replace("vae", decode=self._decoder.decode)
        return call

    def take_up(
        self, call: PausedCall, steps: int, latents: Tensor, held: dict[str, Tensor], plain: dict[str, Any]
    ) -> None:
        """Brings a call that stands at its first question to where it has made some steps, without the model.

        The pipeline's own loop runs on anything, which draws the same random numbers; then what the steps had made
        takes its place.

        Args:
            call: as `open` has made it, sent once.
            steps: how many.
            latents: what they made.
            held: tensors that the scheduler remembered then.
            plain: what else it remembered.
        """
        made = 0
        while made < steps:
            event = call.event
            if isinstance(event, Denoise):
                event = call.send(self._anything(event))
            if isinstance(event, Stepped):
                made += 1
                if made == steps:
                    restore(call.pipe.scheduler, held, plain)
                call.send(latents.to(event.latents.device) if made == steps else event.latents)

    def finish(self, block: int, latents: Tensor) -> Any:
        """What the pipeline returns for a block whose latents are known, without the model."""
        with self.open(block) as call:
            event, made = call.send(), 0
            steps = len(call.pipe.scheduler.timesteps)
            while not isinstance(event, Finished):
                if isinstance(event, Denoise):
                    event = call.send(self._anything(event))
                else:
                    made += 1
                    event = call.send(latents.to(event.latents.device) if made == steps else event.latents)
            return event.output

    def _anything(self, event: Denoise) -> Any:
        sample = torch.zeros_like(event.arguments[self._sample])
        return (sample,) if event.arguments.get("return_dict") is False else Transformer2DModelOutput(sample=sample)

    def _generators(self, block: int) -> Any:
        """What a scheduler that adds noise draws from: every block its own."""
        made = [torch.Generator().manual_seed(seeds.derive(seed, "steps", block)) for seed in self.drawn]
        return made if len(made) > 1 else made[0]

    def _prepare(self, original: Any, block: int) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            latents = original(*args, **kwargs)
            if not isinstance(latents, Tensor) or "latents" not in signature.parameters:
                raise UnsupportedError(
                    f"{type(self.pipe).__name__} prepares more than latents, so its video cannot be cut into blocks; "
                    "use a text-to-video pipeline, or ClipParallel"
                )
            self.latents = latents
            if self._given is not None:
                return latents
            bound = signature.bind(*args, **kwargs)
            bound.arguments["latents"] = self._noise.like(latents, self.dim, block)
            return original(*bound.args, **bound.kwargs)

        return prepare_latents


def joined(outputs: Sequence[Any], dim: int) -> Any:
    """The output of the whole video out of those of its blocks, in order: arrays, tensors or lists of pictures.

    Args:
        outputs: what the pipeline returned for each block.
        dim: of the frames, where they are tensors.
    """
    parts = [output[0] if isinstance(output, tuple) else output.frames for output in outputs]
    if isinstance(parts[0], np.ndarray):
        whole: Any = np.concatenate(parts, axis=1)
    elif isinstance(parts[0], Tensor):
        whole = torch.cat(parts, dim=dim)
    else:
        whole = [list(itertools.chain.from_iterable(pictures)) for pictures in zip(*parts, strict=True)]
    return (whole,) if isinstance(outputs[0], tuple) else type(outputs[0])(frames=whole)


def frames_of(pipe: Any, blocks: int) -> int:
    """How many frames a number of blocks of a causal model's pipeline are."""
    return (blocks * causal_block(pipe.transformer) - 1) * _factor(pipe) + 1


def _factor(pipe: Any) -> int:
    for name in _FACTORS:
        if hasattr(pipe, name):
            return int(getattr(pipe, name))
    raise UnsupportedError(f"{type(pipe).__name__} does not say how many frames a latent frame stands for")


def _latent_frames(pipe: Any, arguments: Mapping[str, Any], factor: int) -> int:
    default = inspect.signature(type(pipe).__call__).parameters.get("num_frames")
    if default is None:
        raise UnsupportedError(f"{type(pipe).__name__} takes no num_frames: it makes no video")
    wanted = arguments.get("num_frames", default.default)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ArgumentError(f"num_frames={wanted!r}; use 1 or more")
    whole, rest = divmod(wanted - 1, factor)
    if rest:
        low = whole * factor + 1
        raise ArgumentError(
            f"num_frames={wanted}: the autoencoder of {type(pipe).__name__} makes 1 + {factor} n frames; "
            f"use {low} or {low + factor}"
        )
    return whole + 1


def _cut(total: int, frames: int) -> tuple[int, ...]:
    whole, rest = divmod(total, frames)
    return (*[frames] * whole, *([rest] if rest else []))
