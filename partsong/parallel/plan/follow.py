"""Follows a pipeline's own loop: its scheduler drives the clock, and its first latents and its decoder are shared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from partsong.parallel.cuts.batch import BatchSplit
from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.hooks.finite_watch import FiniteWatch
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.hooks.noise_levels import noise_ratios
from partsong.parallel.hooks.replaced_method import Method, ReplacedMethods
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.plan.callers import Callers
from partsong.parallel.plan.state import PlanState
from partsong.parallel.ranks.mesh import AXES
from partsong.parallel.ranks.noise import share_latents

__all__ = ["calling_pipeline", "follow_pipeline"]

#: Pipelines call it when they are done: a refiner's first half makes fewer steps than its scheduler has.
_LAST_ACT = "maybe_free_model_hooks"


def follow_pipeline(
    plan: PlanState, pipe: Any, hooks: HookSet, methods: ReplacedMethods, *, shares_decoder: bool
) -> None:
    """Lets a plan follow, and where needed change, a pipeline's work around its denoiser.

    Args:
        plan: its clock follows the pipeline from now on.
        pipe: a diffusers pipeline.
        hooks: takes the hook on the decoder.
        methods: takes the replaced methods of the pipeline and its scheduler.
        shares_decoder: whether the samples are decoded on different ranks of the ``data`` axis.
    """
    if _scheduler(pipe) is None:
        return
    plan.guider = lambda: getattr(pipe, "guider", None)
    watch, tells_end = FiniteWatch(), _tells_end(pipe)
    for decoder in _decoders(pipe):
        hooks.on_remove(decoder.register_forward_hook(_watching(watch, tells_end)).remove)
    if plan.loop is not None:
        # The sampler runs copies of the pipeline with schedulers of their own, and drives the clock itself.
        if hasattr(pipe, "check_inputs"):
            methods.replace(pipe, "check_inputs", lambda method: _before(method, plan.check_loop))
        if tells_end:
            methods.replace(pipe, _LAST_ACT, lambda method: _after(_ending(plan, method), watch.report))
        return
    plan.clock.driven = True
    plan.callers = Callers(pipe, plan.clock, lambda other: _watch_end(plan, other, methods))
    plan.follow_scheduler = lambda: _follow_scheduler(plan, pipe, methods, watch)
    plan.follow_scheduler()
    if hasattr(pipe, "prepare_latents"):
        methods.replace(pipe, "prepare_latents", lambda method: _sharing_result(plan, method))
    plan.tells_end = tells_end
    if tells_end:
        if hasattr(pipe, "check_inputs"):  # the first step of a call; the previous call may have ended in an error
            methods.replace(pipe, "check_inputs", lambda method: _before(method, plan.begin_check))
        methods.replace(pipe, _LAST_ACT, lambda method: _after(_ending(plan, method), plan.end_call, watch.report))
    decoder = getattr(getattr(pipe, "vae", None), "decoder", None)
    if decoder is not None and shares_decoder and plan.mesh.axis("data").size > 1:
        hooks.add(decoder, _decoder_hook(plan, decoder), "data")


def calling_pipeline(pipe: Any, denoisers: Sequence[nn.Module]) -> Any:
    """Returns the pipeline whose own loop calls the denoisers: a combined pipeline holds it as a part."""
    parts = [part for part in vars(pipe).values() if isinstance(getattr(part, "components", None), Mapping)]
    return next((part for part in parts if {*denoisers} <= {*part.components.values()}), pipe)


def _tells_end(pipe: Any) -> bool:
    """Says whether the call of a pipeline ends with a method that can be noticed."""
    return _LAST_ACT in inspect.unwrap(type(pipe).__call__).__code__.co_names


def _watch_end(plan: PlanState, other: Any, methods: ReplacedMethods) -> None:
    """Ends a generation that another pipeline has begun when that one's call ends."""

    def end() -> None:
        methods.restore(other)
        plan.end_call()

    if _tells_end(other) and not methods.holds(other):
        methods.replace(other, _LAST_ACT, lambda method: _after(method, end))


def _scheduler(pipe: Any) -> Any:
    """Returns the scheduler of a pipeline: the first of several that step together."""
    own = getattr(pipe, "scheduler", None)
    named = (name for name in getattr(pipe, "components", ()) if name.endswith("_scheduler"))
    return own if own is not None else next((getattr(pipe, name) for name in sorted(named)), None)


def _follow_scheduler(plan: PlanState, pipe: Any, methods: ReplacedMethods, watch: FiniteWatch) -> None:
    """Lets the pipeline's scheduler drive the clock, also one that replaces the first."""
    scheduler = _scheduler(pipe)
    if plan.scheduler is scheduler:
        return
    # Its timesteps were set before the plan followed it; but not for another pipeline's call.
    is_late = plan.scheduler is not None and plan.callers is not None and plan.callers.now() in (None, pipe)
    plan.scheduler, follower = scheduler, _SchedulerFollower(plan, watch)
    methods.replace(scheduler, "set_timesteps", follower.begin, follower.begin_copy)
    methods.replace(scheduler, "step", follower.advance, follower.advance_copy)
    if not hasattr(pipe, "prepare_latents") and hasattr(scheduler, "scale_model_input"):
        # The pipeline draws its latents inline, as DiT's does: here they are seen first.
        methods.replace(scheduler, "scale_model_input", lambda method: _sharing_argument(plan, method))
    if is_late:
        plan.clock.begin(*_schedule(scheduler))


def _schedule(scheduler: Any) -> tuple[list[float], list[float] | None, list[float] | None]:
    """Returns timesteps, noise levels and noise over signal of a scheduler; many have only timesteps."""
    times, known = scheduler.timesteps.tolist(), getattr(scheduler, "sigmas", None)
    sigmas = known.tolist() if isinstance(known, Tensor) else None
    return times, sigmas, noise_ratios(scheduler, times, sigmas)


class _SchedulerFollower:
    """Drives a plan's clock by the methods of its pipeline's scheduler, or of the copies a pipeline makes of it."""

    def __init__(self, plan: PlanState, watch: FiniteWatch) -> None:
        self.plan, self.watch = plan, watch

    def begin(self, set_timesteps: Method) -> Method:
        def begin_generation() -> None:
            self.watch.report()
            scheduler: Any = set_timesteps.__self__  # type: ignore[attr-defined]
            self.plan.begin_generation(*_schedule(scheduler))

        return _after(set_timesteps, begin_generation)

    def begin_copy(self, set_timesteps: Method) -> Method:
        def begin_part() -> None:
            # A scheduler per frame: only the pipeline knows how many steps there will be.
            clock = self.plan.clock
            begin = self.plan.begin_generation if clock.step or clock.is_called else clock.begin
            begin()

        return _after(set_timesteps, begin_part)

    def advance(self, step: Method) -> Method:
        signature = inspect.signature(step)

        def advance_after(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            clock = self.plan.clock
            if clock.step == 0 and not clock.is_followed:
                # Schedulers take the timestep in different positions.
                clock.begun_at(signature.bind(*args, **kwargs).arguments["timestep"])
            self._look(result)
            # Some pipelines call the scheduler twice per call of the model.
            if clock.is_called and not clock.is_followed:
                self._end_step()
            return result

        return advance_after

    def advance_copy(self, step: Method) -> Method:
        def advance_together(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._look(result)
            # A scheduler per frame: all of them together make one step, after the model's calls for it.
            if self.plan.clock.is_called and not self.plan.clock.is_followed:
                self._end_step()
            return result

        return advance_together

    def _look(self, result: Any) -> None:
        """Looks for a NaN, and reports after the last step where nothing notices the end of a call."""
        plan = self.plan
        if plan.mesh.rank == 0:  # all ranks have the same
            steps = "" if plan.clock.num_steps is None else f" of {plan.clock.num_steps}"
            self.watch.look(result, f"at step {plan.clock.step + 1}{steps}")
        if not plan.tells_end and plan.clock.is_last_step:
            self.watch.report()

    def _end_step(self) -> None:
        self.plan.clock.advance()
        self.plan.close_record()


def _before(method: Method, act: Callable[[], None]) -> Method:
    def called(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    return called


def _after(method: Method, *acts: Callable[[], None]) -> Method:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        for act in acts:
            act()
        return result

    return called


def _ending(plan: PlanState, method: Method) -> Method:
    """Lets a pipeline renew its own offloading, which is not a change by the user."""

    def clean_up(*args: Any, **kwargs: Any) -> Any:
        plan.is_ending = True
        try:
            return method(*args, **kwargs)
        finally:
            plan.is_ending = False

    return clean_up


def _sharing_result(plan: PlanState, prepare_latents: Method) -> Method:
    def prepare_and_share(*args: Any, **kwargs: Any) -> Any:
        result = prepare_latents(*args, **kwargs)
        latents = result[0] if isinstance(result, tuple) else result
        if not isinstance(latents, Tensor):
            return result
        shared = _shared(plan, latents)
        return (shared, *result[1:]) if isinstance(result, tuple) else shared

    return prepare_and_share


def _sharing_argument(plan: PlanState, scale_model_input: Method) -> Method:
    def share_and_scale(sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        return scale_model_input(_shared(plan, sample) if plan.clock.step == 0 else sample, *args, **kwargs)

    return share_and_scale


def _shared(plan: PlanState, latents: Tensor) -> Tensor:
    if plan.tells_end:
        plan.begin_call()
    plan.seen.latents.append(latents.nbytes)
    return share_latents(plan.mesh.axis(*AXES), latents)


def _decoders(pipe: Any) -> list[nn.Module]:
    """Lists the decoders of a pipeline's autoencoders."""
    coders = [part for part in getattr(pipe, "components", {}).values() if hasattr(part, "decode")]
    decoders = (getattr(coder, "decoder", None) for coder in coders)
    return [decoder for decoder in decoders if isinstance(decoder, nn.Module)]


def _watching(watch: FiniteWatch, tells_end: bool) -> Callable[..., None]:
    def look(decoder: nn.Module, given: Any, made: Any) -> None:
        watch.look(made, "in the decoder")
        if not tells_end:
            watch.report()

    return look


def _decoder_hook(plan: PlanState, decoder: nn.Module) -> AroundHook:
    signature = signature_of(decoder)
    first = next(iter(signature.parameters))
    split = BatchSplit(
        plan.mesh.axis("data"), BatchRules(model=type(decoder).__name__, batched=(first,), trusting=True), decoder
    )

    def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        latents = named[first]
        if not isinstance(latents, Tensor) or len(latents) < 2:  # a decoder of molecules takes a dictionary
            return forward(**named)
        total = len(latents)
        output = split.run(forward, named, latents)
        plan.seen.decoded.append((total, sample_of(output)[0].nbytes))
        return output

    return AroundHook(run, signature)
