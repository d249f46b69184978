"""Makes a long video from calls of a pipeline, one per block of frames, each in the pipeline's own loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from partsong import seeds
from partsong.accelerator import forked_random
from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import Count, check_value
from partsong.parallel import Plan
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.samplers.long_video.frame_counts import temporal_factor
from partsong.samplers.long_video.frame_noise import FrameNoise, draw_seeds
from partsong.samplers.long_video.staged_frames import StagedFrames
from partsong.samplers.long_video.video_decode import StreamingDecoder
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from partsong.samplers.pipeline.plan_call import call_pipeline
from partsong.samplers.pipeline.scheduler_state import restore
from partsong.samplers.pipeline.shared_text import SharedText

__all__ = ["VideoBlocks"]


#: Arguments of pipelines and their `prepare_latents` with reference pictures or videos.
_PICTURES = frozenset({"image", "images", "video", "videos", "conditions", "control_video"})


class VideoBlocks:
    """Opens and closes the calls for the blocks of one video.

    Args:
        plan: strategies on a video pipeline.
        arguments: the pipeline's own, for the whole video.
        frames: latent frames of a block.
        context: frames of the block before that a block sees.
        noise: see `FrameNoise`.
        everywhere: decodes the latents on every rank, not only on the first.

    Among the arguments may be ``prompts``, texts by the frame of the video from which on they hold. The first block
    with such a frame follows its text, and so do those after it.

    Attributes:
        stage: the model's blocks on this rank.
        dim: of the frames in the pipeline's latents, or of the tokens of all of them.
        sizes: latent frames of every block.
        factor: frames of video that a latent frame stands for.
        latents: initial latents of the block that was opened last.
        drawn: the seeds.
        prompts: later texts by the block that they begin with.
        decodes: whether this rank decodes.

    Raises:
        ArgumentError: the autoencoder cannot make this number of frames, or a later text is not of a frame.
        UnsupportedError: the pipeline's video cannot be cut.
    """

    def __init__(
        self, plan: Plan, arguments: Mapping[str, Any], *, frames: int, context: int, noise: str, everywhere: bool
    ) -> None:
        denoiser = plan.denoisers[0]
        assert isinstance(denoiser.cut, StagedFrames)
        self.plan, self.stage, self.arguments = plan, denoiser.cut, dict(arguments)
        self.pipe, self.dim = plan.target, self.stage.frames_dim
        if any(self.arguments.get(name) is not None for name in _PICTURES):
            raise self._refused()
        self.factor = _factor(self.pipe)
        total = _latent_frames(self.pipe, self.arguments, self.factor)
        self.sizes = tuple(min(frames, total - start) for start in range(0, total, frames))
        self.prompts = self._later_texts(frames)
        self._given: Tensor | None = self.arguments.pop("latents", None)
        # Where tokens of all frames are counted, a frame has several.
        self._is_packed = self.stage.counts_tokens
        length = total if self._given is None else self._given.shape[self.dim]
        if self._given is not None and (length % total or (length != total and not self._is_packed)):
            raise ArgumentError(
                f"latents of shape {list(self._given.shape)} were given, with {length} "
                f"{'tokens' if self._is_packed else 'frames'}; the video has {total} latent frames"
            )
        self.drawn = draw_seeds(self.arguments.get("generator"))
        self._noise = FrameNoise(self.drawn, frames=frames, context=context, kind=noise)
        self._texts: dict[str | None, SharedText] = {}
        is_latent = self.arguments.get("output_type") == "latent"
        self.decodes = everywhere or plan.mesh.is_main
        self._decoder = StreamingDecoder(self.pipe.vae, total) if self.decodes and not is_latent else None
        self.latents = torch.empty(0)

    def _later_texts(self, frames: int) -> dict[int, str]:
        """Takes the later texts out of the arguments, by the block that they begin with, in order."""
        given: Mapping[int, str] = self.arguments.pop("prompts", None) or {}
        last = (sum(self.sizes) - 1) * self.factor
        for frame in given:
            if not 0 < frame <= last:
                raise ArgumentError(f"prompts has a text from frame {frame} on; use frames from 1 to {last}")
        if given and not isinstance(self.arguments.get("prompt"), str):
            raise ArgumentError("prompts holds the texts after the first one; give that as prompt, one text")
        return {((frame - 1) // self.factor + 1) // frames: given[frame] for frame in sorted(given)}

    def close(self, tracks: MutableMapping[int, Any]) -> None:
        """Ends the calls that are open, and forgets what was kept for the video."""
        for track in tracks.values():
            track.call.close()
        tracks.clear()
        self.stage.forget()
        if self._decoder is not None:
            self._decoder.close()

    def open(self, block: int) -> PausedCall:
        """Opens the call of a block, and lets it run to its first call of the denoiser.

        Raises:
            UnsupportedError: it makes none.
        """
        chosen = dict(self.arguments)
        chosen["num_frames"] = (self.sizes[block] - 1) * self.factor + 1
        chosen["generator"] = self._generators(block)
        if self._given is not None:
            each = self._given.shape[self.dim] // sum(self.sizes)
            start, length = sum(self.sizes[:block]) * each, self.sizes[block] * each
            chosen["latents"] = self._given.narrow(self.dim, start, length)
        text = next((self.prompts[start] for start in reversed(self.prompts) if start <= block), None)
        chosen |= {} if text is None else {"prompt": text}
        # Many pipelines give their scheduler no generator; what it draws then must differ from block to block too.
        with forked_random(self.plan.mesh.device):
            torch.manual_seed(seeds.derive(self.drawn[0], "default generator", block))
            call = call_pipeline(self.plan, chosen, decodes=self.decodes, shows_progress=False)
        self._texts.setdefault(text, SharedText()).join(call)
        replace_method(call.pipe, "prepare_latents", lambda method: self._preparing(method, block))
        if self._decoder is not None:
            call.replace("vae", decode=self._decoder.decode)
        if not isinstance(call.send(), Denoise):
            call.close()
            raise UnsupportedError(f"{type(self.pipe).__name__} made no call of its denoiser")
        return call

    def take_up(
        self, call: PausedCall, steps: int, latents: Tensor, held: dict[str, Tensor], plain: dict[str, Any]
    ) -> None:
        """Advances a call from its first question by some steps, without the model.

        Args:
            call: as `open` returns it.
            steps: how many.
            latents: result of these steps.
            held: tensors in the scheduler's state then.
            plain: the rest of its state.
        """
        event = self._replay(call, steps)
        restore(call.pipe.scheduler, held, plain)
        call.send(latents.to(event.latents.device))

    def finished(self, latents_of_blocks: Iterable[Tensor]) -> Iterator[Any]:
        """Yields what the pipeline returns for the first blocks, whose latents a journal holds.

        Ranks that decode nothing yield None for each.
        """
        for block, latents in enumerate(latents_of_blocks):
            with self.plan.looping():
                yield self.finish(block, latents) if self.decodes else None

    def finish(self, block: int, latents: Tensor) -> Any:
        """Returns what the pipeline returns for a block, from its last latents; blocks come in order."""
        with self.open(block) as call:
            last = self._replay(call, len(call.pipe.scheduler.timesteps))
            end = call.send(latents.to(last.latents.device))
            assert isinstance(end, Finished)
            return end.output

    def _replay(self, call: PausedCall, steps: int) -> Stepped:
        """Runs a call through some steps on placeholders, which draws the same random numbers as with the model."""
        event = call.event
        for _ in range(steps):
            event = call.send(event.latents) if isinstance(event, Stepped) else event
            while isinstance(event, Denoise):
                event = call.send(self.placeholder(event))
        assert isinstance(event, Stepped)
        return event

    def placeholder(self, event: Denoise) -> Any:
        """Returns an answer in the form of the model's, without its values."""
        layout = self.stage.layout(event.arguments)  # its input may have more channels
        return layout.returned(torch.zeros_like(layout.owners).contiguous())

    def _generators(self, block: int) -> Any:
        """Returns the generators of a scheduler that adds noise: every block has its own."""
        generators = [torch.Generator().manual_seed(seeds.derive(seed, "steps", block)) for seed in self.drawn]
        return generators if len(generators) > 1 else generators[0]

    def _refused(self) -> UnsupportedError:
        return UnsupportedError(
            f"{type(self.pipe).__name__} prepares more than latents, so its video cannot be cut into blocks; use a "
            "text-to-video pipeline, or ClipParallel"
        )

    def _preparing(self, prepare: Method, block: int) -> Method:
        signature = inspect.signature(prepare)
        # Reference pictures would have to be cut into blocks as well.
        is_plain = "latents" in signature.parameters and not _PICTURES & signature.parameters.keys()

        def prepare_block(*args: Any, **kwargs: Any) -> Any:
            latents = prepare(*args, **kwargs) if is_plain else None
            if not isinstance(latents, Tensor):
                raise self._refused()
            self.latents = latents
            if self._given is not None:
                return latents
            bound = signature.bind(*args, **kwargs)
            bound.arguments["latents"] = self._noise_like(latents, block)
            return prepare(*bound.args, **bound.kwargs)

        return prepare_block

    def _noise_like(self, latents: Tensor, block: int) -> Tensor:
        """Returns the noise of a block in the shape of the pipeline's own noise."""
        if self._is_packed:
            apart = latents.unflatten(self.dim, (self.sizes[block], -1))
            noise = self._noise.like(apart, self.dim, block).flatten(self.dim, self.dim + 1)
        else:
            noise = self._noise.like(latents, self.dim, block)
        # Channels for a picture that is not given stay empty.
        empty = (latents == 0).flatten(0, -2).all(dim=0)
        return noise.masked_fill(empty, 0.0)


def _factor(pipe: Any) -> int:
    factor = temporal_factor(pipe)
    if factor is None:
        raise UnsupportedError(f"{type(pipe).__name__} does not say how many frames a latent frame stands for")
    return factor


def _latent_frames(pipe: Any, arguments: Mapping[str, Any], factor: int) -> int:
    default = inspect.signature(type(pipe).__call__).parameters.get("num_frames")
    if default is None:
        raise UnsupportedError(f"{type(pipe).__name__} takes no num_frames: it makes no video")
    num_frames = arguments.get("num_frames", default.default)
    check_value("num_frames", num_frames, Count)
    whole, rest = divmod(num_frames - 1, factor)
    if rest:
        low = whole * factor + 1
        raise ArgumentError(
            f"num_frames={num_frames}: the autoencoder of {type(pipe).__name__} makes 1 + {factor} n frames; "
            f"use {low} or {low + factor}"
        )
    return whole + 1
