"""Runs structure guidance's loop: the pipeline's own call at full size, whose denoiser is answered patch by patch.

Two calls of the pipeline run side by side, both paused at the denoiser (see `paused`). Every rank runs the large one:
its latents, guidance scale and scheduler are small work, and all ranks do it alike. The model's calls are what is
shared out. One rank runs the small one as well. Only what the scheduler is given is changed: the prediction, after
classifier-free guidance, is moved so that its clean sample agrees with the small picture's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel import Plan
from partsong.parallel.hooks.model_hooks import sample_of
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.parallel.ranks.collectives import Pending
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from partsong.samplers.pipeline.plan_call import call_pipeline, refuse_arguments
from partsong.samplers.structure_guidance.estimates import Prediction
from partsong.samplers.structure_guidance.object_mask import ObjectMask
from partsong.samplers.structure_guidance.strategy import GuidedPatches, PatchGrid, StructureGuidance, grid_for

__all__ = ["structure_guidance"]

PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline")
_NO_CALLBACK = "what it changes would not reach the small picture; leave it out"
_REFUSED = {
    "callback_on_step_end": _NO_CALLBACK,
    "callback": _NO_CALLBACK,
    "skip_guidance_layers": "it calls the model twice in a step; leave it out",
}


@torch.no_grad()
def structure_guidance(plan: Plan, strategy: StructureGuidance, **arguments: Any) -> Any:
    """Samples with `StructureGuidance`; see `StrategyRow.loop`.

    Raises:
        UnsupportedError: the pipeline is not known, the size is no multiple of the small one, a callback was given, or
            the scheduler does not say what the model predicts.

    Source: ASGDiffusion, arXiv 2412.06163.
    """
    name = type(plan.target).__name__
    if name not in PIPELINES:
        raise UnsupportedError(f"StructureGuidance on {name}: it is known for {', '.join(PIPELINES)} only")
    refuse_arguments(arguments, _REFUSED)
    plan.begin_loop()
    with ExitStack() as stack, plan.looping():
        return _Loop(plan, strategy, arguments, stack).run()


class _Loop:
    def __init__(self, plan: Plan, strategy: StructureGuidance, arguments: dict[str, Any], stack: ExitStack) -> None:
        self.plan, self.strategy, self.arguments, self.stack = plan, strategy, arguments, stack
        self.denoiser, patches = plan.denoisers[0], plan.denoisers[0].cut
        assert isinstance(patches, GuidedPatches)
        self.patches = patches
        self.prediction = Prediction(plan.target.scheduler)
        self.step, self.inputs = 0, torch.empty(0)
        self.estimates: dict[int, tuple[Tensor, Pending]] = {}
        self.small: _Small | None = None
        self.high = stack.enter_context(call_pipeline(plan, arguments))
        self.kept: dict[str, Any] = {}  # what the small call takes over: encoded prompts, and the noise it begins with
        for name in ("encode_prompt", "prepare_latents"):
            replace_method(self.high.pipe, name, functools.partial(self._keeping, name))
        _before_step(self.high.pipe.scheduler, self._guided)

    def run(self) -> Any:
        """Answers the large call's questions until it has ended."""
        event = self.high.send()
        while not isinstance(event, Finished):
            if isinstance(event, Stepped):
                self.step += 1
                self.plan.close_record()
                event = self.high.send(event.latents)
            else:
                event = self.high.send((self._predict(event.arguments),))
        self.plan.clock.step = self.step
        self.high.hand_back_random_state()
        return event.output

    def _keeping(self, name: str, method: Method) -> Method:
        def keep(*args: Any, **kwargs: Any) -> Any:
            self.kept[name] = method(*args, **kwargs)
            return self.kept[name]

        return keep

    def _predict(self, named: dict[str, Any]) -> Tensor:
        """Puts the prediction for the whole picture together out of those for its patches."""
        key = self.denoiser.adapter.sample
        sample: Tensor = named[key]
        if self.step == 0:
            self._set_up(sample)
        self.inputs = sample
        self.plan.clock.step = self.step
        self.denoiser.begin_call(named, self.step)
        places = self.patches.grid.places
        pieces = [sample[..., places[n][0], places[n][1]].contiguous() for n in self.patches.mine]
        parts = [sample_of(self.denoiser.module(**{**named, key: piece})) for piece in pieces]
        every, pending = self.patches.share_patches(parts, sample[..., places[0][0], places[0][1]])
        # The others need no more of this rank in this step, so the small picture comes after the patches' messages.
        self._run_small(sample)
        pending.wait()
        whole = self.patches.grid.blend(every, torch.empty_like(sample, memory_format=torch.contiguous_format))
        self.denoiser.seen.note_call(sample, whole, 0)
        return whole

    def _set_up(self, sample: Tensor) -> None:
        pipe, times = self.high.pipe, self.high.pipe.scheduler.timesteps
        grid = _grid(pipe, self.denoiser.module, sample, self.strategy)
        self.patches.lay_out(grid, [self.strategy.weight_at(self.prediction.noise(time)) for time in times])
        self.plan.clock.num_steps = len(times)
        if self.patches.has_small and self.patches.needs_small(0):
            scale = pipe.vae_scale_factor
            sized = {"height": grid.patch[0] * scale, "width": grid.patch[1] * scale}
            call = call_pipeline(self.plan, {**self.arguments, **sized}, decodes=False, shows_progress=False)
            self.stack.enter_context(call)
            self.small = _Small(call, self, F.avg_pool2d(self.kept["prepare_latents"], grid.factor) * grid.factor)

    def _run_small(self, sample: Tensor) -> None:
        """Makes one step of the small picture on the rank that has it, and sends its estimate on its way."""
        if not self.patches.needs_small(self.step):
            return
        batch, channels = self.kept["prepare_latents"].shape[:2]
        masked = int(self.strategy.mask == "attention")
        estimate = sample.new_empty((batch, channels + masked, *self.patches.grid.patch))
        if self.small is not None:
            estimate.copy_(self.small.advance())
        self.estimates[self.step] = estimate, self.patches.share_small(estimate)

    def _guided(self, output: Tensor, timestep: Any) -> Tensor:
        """Moves a prediction towards the small picture's, as far as this step's weight says."""
        weight = self.patches.weights[self.step]
        if self.patches.grid.factor == 1 or weight == 0:
            return output
        # Only the very first step has nothing older to read than its own.
        estimate, pending = self.estimates[max(0, self.step - 1)]
        pending.wait()
        if self.step > 0:
            del self.estimates[self.step - 1]
        grid, channels = self.patches.grid, output.shape[1]
        target, mask = estimate[:, :channels], estimate[:, channels:]
        if self.strategy.mask == "attention":
            weight = weight * _grown(mask, grid)
        if self.strategy.guide == "prediction":
            return output + weight * (_grown(target, grid) - output)
        clean = self.prediction.clean(self.inputs[: len(output)], output, timestep)
        return self.prediction.moved(output, weight * (_grown(target, grid) - clean), timestep)


class _Small:
    """Runs the small picture, which is a call of the pipeline of its own, one step at a time."""

    def __init__(self, call: PausedCall, loop: _Loop, first: Tensor) -> None:
        self.call, self.loop = call, loop
        self.estimate, self.inputs, self.mask = first, first, first
        # Means of squares have less variance than single positions: `first` is scaled back to unit variance.
        replace_method(call.pipe, "prepare_latents", lambda method: lambda *args, **kwargs: first.clone())
        replace_method(call.pipe, "encode_prompt", lambda method: lambda *args, **kwargs: loop.kept["encode_prompt"])
        _before_step(call.pipe.scheduler, self._noted)
        call.send()

    def advance(self) -> Tensor:
        """Makes one step; returns its estimate of the clean sample, with the mask as a last channel if there is one."""
        event, denoiser = self.call.event, self.loop.denoiser
        assert isinstance(event, Denoise)
        self.inputs = event.arguments[denoiser.adapter.sample]
        masked = self.loop.strategy.mask == "attention"
        if masked:
            num_text = event.arguments["encoder_hidden_states"].shape[1]
            with ObjectMask(self.loop.patches.grid.patch, num_text) as mask:
                output = denoiser.module(**event.arguments)
            self.mask = mask.weights(len(self.estimate))
        else:
            output = denoiser.module(**event.arguments)
        event = self.call.send(output)
        assert isinstance(event, Stepped)
        self.call.send(event.latents)
        return torch.cat([self.estimate, self.mask.to(self.estimate)], dim=1) if masked else self.estimate

    def _noted(self, output: Tensor, timestep: Any) -> Tensor:
        self.estimate = output
        if self.loop.strategy.guide != "prediction":
            self.estimate = self.loop.prediction.clean(self.inputs[: len(output)], output, timestep)
        return output


def _grid(pipe: Any, module: Any, sample: Tensor, strategy: StructureGuidance) -> PatchGrid:
    """Lays out the patches of a latent, from the model's configuration."""
    scale, side = pipe.vae_scale_factor, module.config.sample_size
    if strategy.training_size is not None:
        side = max(1, strategy.training_size // scale)
    trained = (side[0], side[1]) if isinstance(side, list | tuple) else (side, side)
    # The pipelines want sides of whole patches, and of multiples of 8 pixels.
    multiple = max(module.config.get("patch_size") or 1, -(-8 // scale))
    size = (sample.shape[-2], sample.shape[-1])
    return grid_for(size, trained, strategy.overlap, multiple)


def _grown(latents: Tensor, grid: PatchGrid) -> Tensor:
    """Enlarges latents smoothly to the size of the large picture."""
    return F.interpolate(latents, scale_factor=grid.factor, mode="bilinear")


def _before_step(scheduler: Any, change: Callable[[Tensor, Any], Tensor]) -> None:
    """Lets a scheduler step with a changed prediction."""

    def changing(step: Method) -> Method:
        def step_changed(output: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
            return step(change(output, timestep), timestep, *args, **kwargs)

        return step_changed

    replace_method(scheduler, "step", changing)
