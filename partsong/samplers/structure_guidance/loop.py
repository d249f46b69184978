"""Runs structure guidance's loop: the pipeline's own call at full size, with the denoiser computed patch by patch.

Two calls of the pipeline run side by side, both paused at the denoiser (see `paused`). Every rank runs the large one:
its latents, guidance scale and scheduler are little work, which all ranks do alike. The calls of the model are
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
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks.collectives import Pending
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from partsong.samplers.pipeline.plan_call import call_pipeline, refuse_arguments
from partsong.samplers.structure_guidance.estimates import Prediction
from partsong.samplers.structure_guidance.object_mask import ObjectMask
from partsong.samplers.structure_guidance.pictures import PictureForm, form_of
from partsong.samplers.structure_guidance.strategy import GuidedPatches, PatchGrid, StructureGuidance, grid_for

__all__ = ["structure_guidance"]

_NO_CALLBACK = "what it changes would not reach the small picture; leave it out"
_REFUSED = {"callback_on_step_end": _NO_CALLBACK, "callback": _NO_CALLBACK}


@torch.no_grad()
def structure_guidance(plan: Plan, strategy: StructureGuidance, **arguments: Any) -> Any:
    """Samples with `StructureGuidance`; see `StrategyRow.loop`.

    Raises:
        UnsupportedError: the pipeline is not known, the size is no multiple of the small one, a callback was given, or
            the scheduler does not say what the model predicts.

    Source: ASGDiffusion, arXiv 2412.06163.
    """
    reason = strategy.refuses(plan.denoisers[0].adapter)
    if reason is not None:  # one rank samples with this loop too
        raise UnsupportedError(f"StructureGuidance on {plan.denoisers[0].adapter.model}: {reason}")
    form = form_of(plan.target, arguments)
    refuse_arguments(arguments, {**_REFUSED, **form.refused})
    plan.begin_loop()
    with ExitStack() as stack, plan.looping():
        return _Loop(plan, strategy, form, arguments, stack).run()


class _Loop:
    def __init__(
        self, plan: Plan, strategy: StructureGuidance, form: PictureForm, arguments: dict[str, Any], stack: ExitStack
    ) -> None:
        self.plan, self.strategy, self.form, self.arguments, self.stack = plan, strategy, form, arguments, stack
        self.denoiser, patches = plan.denoisers[0], plan.denoisers[0].cut
        assert isinstance(patches, GuidedPatches)
        self.patches = patches
        self.prediction = Prediction(plan.target.scheduler)
        self.step = self.calls = 0  # and the calls of the model in this step
        self.inputs, self.size = torch.empty(0), (0, 0)  # the model's last input, as a picture, and its size
        self.estimates: dict[int, tuple[Tensor, Pending]] = {}
        self.small: _Small | None = None
        self.high = stack.enter_context(call_pipeline(plan, arguments))
        # The small call reuses the encoded prompts, the initial noise and the schedule.
        self.kept: dict[str, list[Any]] = {"encode_prompt": [], "prepare_latents": [], "set_timesteps": []}
        for name in ("encode_prompt", "prepare_latents"):
            replace_method(self.high.pipe, name, functools.partial(self._keeping, name))
        replace_method(self.high.pipe.scheduler, "set_timesteps", self._keeping_arguments)
        _before_step(self.high.pipe.scheduler, self._guided)

    def run(self) -> Any:
        """Answers the large call's questions until it has ended."""
        event = self.high.send()
        while not isinstance(event, Finished):
            if isinstance(event, Stepped):
                self.step, self.calls = self.step + 1, 0
                self.plan.close_record()
                event = self.high.send(event.latents)
            else:
                event = self.high.send((self._predict(event.arguments),))
                self.calls += 1
        self.plan.clock.step = self.step
        self.high.hand_back_random_state()
        return event.output

    def _keeping(self, name: str, method: Method) -> Method:
        def keep(*args: Any, **kwargs: Any) -> Any:
            self.kept[name].append(method(*args, **kwargs))
            return self.kept[name][-1]

        return keep

    def _keeping_arguments(self, method: Method) -> Method:
        def keep(*args: Any, **kwargs: Any) -> Any:
            self.kept["set_timesteps"].append((args, kwargs))
            return method(*args, **kwargs)

        return keep

    def _predict(self, named: dict[str, Any]) -> Tensor:
        """Assembles the prediction for the whole picture from those for its patches."""
        key = self.denoiser.adapter.sample
        if self.step == self.calls == 0:
            self.size = self.form.size(named, named[key])
            self._set_up(self.form.picture(named[key], self.size))
        self.inputs = sample = self.form.picture(named[key], self.size)
        self.plan.clock.step = self.step
        self.denoiser.begin_call(named, self.step)
        grid = self.patches.grid
        here = {**named, **self.form.for_patch(named, self.size, grid.patch)}
        pieces = [
            sample[..., rows, columns].contiguous() for rows, columns in map(grid.places.__getitem__, self.patches.mine)
        ]
        parts = [self._called({**here, key: self.form.latents(piece)}) for piece in pieces]
        whole = sample.new_empty((len(sample), self._channels(sample), *self.size))
        every, pending = self.patches.share_patches(parts, whole[..., *grid.places[0]], is_first=self.calls == 0)
        # The others need no more of this rank in this call, so the small picture comes after the patches' messages.
        if self.small is not None and self.patches.needs_small(self.step):
            self.small.answer(is_first=self.calls == 0)
        pending.wait()
        whole = self.form.latents(grid.blend(every, whole))
        self.denoiser.seen.note_call(named[key], whole, 0)
        return whole

    def _called(self, named: dict[str, Any]) -> Tensor:
        """Returns the model's prediction for a patch, as a picture."""
        return self.form.picture(sample_of(self.denoiser.module(**named)), self.patches.grid.patch)

    def _channels(self, sample: Tensor) -> int:
        """Returns the channels of a prediction: some models predict a variance as well."""
        return sample.shape[1] if self.form.is_packed else int(self.denoiser.module.config["out_channels"])  # type: ignore[index]

    def _set_up(self, sample: Tensor) -> None:
        pipe, times = self.high.pipe, self.high.pipe.scheduler.timesteps
        self.prediction.learn(times)
        grid = _grid(pipe, self.denoiser.module, sample, self.form, self.strategy)
        self.patches.lay_out(grid, [self.strategy.weight_at(self.prediction.noise(time)) for time in times])
        self.plan.clock.num_steps = len(times)
        if self.patches.has_small and self.patches.needs_small(0):
            scale = pipe.vae_scale_factor
            sized = {"height": grid.patch[0] * scale, "width": grid.patch[1] * scale}
            call = call_pipeline(self.plan, {**self.arguments, **sized}, decodes=False, shows_progress=False)
            self.stack.enter_context(call)
            noise = self.form.picture(_first(self.kept["prepare_latents"][0]), self.size)
            self.small = _Small(call, self, F.avg_pool2d(noise, grid.factor) * grid.factor)

    def _share_small(self, output: Tensor) -> None:
        """Starts sending the estimate of the rank with the small picture."""
        if not self.patches.needs_small(self.step):
            return
        masked = int(self.strategy.mask == "attention")
        estimate = output.new_empty((len(output), output.shape[1] + masked, *self.patches.grid.patch))
        if self.small is not None:
            estimate.copy_(self.small.current())
        self.estimates[self.step] = estimate, self.patches.share_small(estimate)

    def _guided(self, prediction: Tensor, timestep: Any) -> Tensor:
        """Moves a prediction towards the small picture's, as far as this step's weight says."""
        output = self.form.picture(prediction, self.size)
        self._share_small(output)
        weight = self.patches.weights[self.step]
        if self.patches.grid.factor == 1 or weight == 0:
            return prediction
        # Only the first step has no older estimate to read.
        estimate, pending = self.estimates[max(0, self.step - 1)]
        pending.wait()
        if self.step > 0:
            del self.estimates[self.step - 1]
        factor, channels = self.patches.grid.factor, output.shape[1]
        target, mask = estimate[:, :channels], estimate[:, channels:]
        if self.strategy.mask == "attention":
            weight = weight * F.interpolate(mask, scale_factor=factor, mode="bilinear")
        if self.strategy.guide == "prediction":
            grown = F.interpolate(target, scale_factor=factor, mode="bilinear")
            return self.form.latents(output + weight * (grown - output))
        clean = self.prediction.clean(self.inputs[: len(output)], output, timestep)
        change = weight * (self.form.enlarged(target, factor, self.high.pipe.vae) - clean)
        return self.form.latents(self.prediction.moved(output, change, timestep))


class _Small:
    """Runs the small picture, which is a call of the pipeline of its own, in step with the large one."""

    def __init__(self, call: PausedCall, loop: _Loop, first: Tensor) -> None:
        self.call, self.loop = call, loop
        self.estimate, self.inputs, self.mask = first, first, first
        self.size = (first.shape[-2], first.shape[-1])
        prompts = iter(loop.kept["encode_prompt"])
        args, kwargs = loop.kept["set_timesteps"][-1]
        # Means of squares have less variance than single positions: `first` is scaled back to unit variance.
        replace_method(call.pipe, "prepare_latents", self._beginning_with(loop.form.latents(first)))
        replace_method(call.pipe, "encode_prompt", lambda method: lambda *_, **__: next(prompts))
        # Some schedules depend on the size of the picture; both pictures have that of the large one.
        replace_method(call.pipe.scheduler, "set_timesteps", lambda method: lambda *_, **__: method(*args, **kwargs))
        _before_step(call.pipe.scheduler, self._noted)
        call.send()
        loop.prediction.learn(call.pipe.scheduler.timesteps)

    def _beginning_with(self, first: Tensor) -> Callable[[Method], Method]:
        """Makes the pipeline begin with given latents, but with its own positions if it has some."""

        def beginning(method: Method) -> Method:
            def prepare(*args: Any, **kwargs: Any) -> Any:
                if isinstance(self.loop.kept["prepare_latents"][0], Tensor):
                    return first.clone()
                return (first.clone(), *method(*args, **kwargs)[1:])

            return prepare

        return beginning

    def answer(self, *, is_first: bool) -> None:
        """Answers one call of the model; the first of a step has the prompt, and its attention gives the mask."""
        event, loop = self.call.event, self.loop
        assert isinstance(event, Denoise)
        self.inputs = loop.form.picture(event.arguments[loop.denoiser.adapter.sample], self.size)
        if is_first and loop.strategy.mask == "attention":
            num_text = event.arguments["encoder_hidden_states"].shape[1]
            with ObjectMask(self.size, num_text, text_first=loop.form.text_first) as mask:
                output = loop.denoiser.module(**event.arguments)
            self.mask = mask.weights(len(self.estimate))
        else:
            output = loop.denoiser.module(**event.arguments)
        event = self.call.send(output)
        if isinstance(event, Stepped):
            self.call.send(event.latents)

    def current(self) -> Tensor:
        """Returns the last estimate of the clean sample, with the mask as a last channel if there is one."""
        masked = self.loop.strategy.mask == "attention"
        return torch.cat([self.estimate, self.mask.to(self.estimate)], dim=1) if masked else self.estimate

    def _noted(self, prediction: Tensor, timestep: Any) -> Tensor:
        self.estimate = self.loop.form.picture(prediction, self.size)
        if self.loop.strategy.guide != "prediction":
            inputs = self.inputs[: len(prediction)]
            self.estimate = self.loop.prediction.clean(inputs, self.estimate, timestep)
        return prediction


def _first(made: Any) -> Tensor:
    """Returns the latents that a pipeline has prepared, which may come with their positions."""
    latents: Tensor = made if isinstance(made, Tensor) else made[0]
    return latents


def _grid(pipe: Any, module: Any, sample: Tensor, form: PictureForm, strategy: StructureGuidance) -> PatchGrid:
    """Lays out the patches of a latent, from the configuration of the model or, where it has none, the pipeline."""
    scale, side = pipe.vae_scale_factor, module.config.get("sample_size") or pipe.default_sample_size
    if strategy.training_size is not None:
        side = max(1, strategy.training_size // scale)
    trained = (side[0], side[1]) if isinstance(side, list | tuple) else (side, side)
    # The pipelines want sides of whole patches, and of multiples of 8 pixels.
    multiple = max(2 if form.is_packed else module.config.get("patch_size") or 1, -(-8 // scale))
    size = (sample.shape[-2], sample.shape[-1])
    # A patch holds whole tokens, as the whole picture has them.
    return grid_for(size, trained, strategy.overlap, multiple, step=2 if form.is_packed else 1)


def _before_step(scheduler: Any, change: Callable[[Tensor, Any], Tensor]) -> None:
    """Lets a scheduler step with a changed prediction."""

    def changing(step: Method) -> Method:
        def step_changed(output: Tensor, timestep: Any, *args: Any, **kwargs: Any) -> Any:
            return step(change(output, timestep), timestep, *args, **kwargs)

        return step_changed

    replace_method(scheduler, "step", changing)
