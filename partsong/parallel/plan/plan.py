"""Attaches strategies to a pipeline or module, and takes them off again."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from partsong import ledger
from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.attention_call import TOKEN_AXES, Stage
from partsong.parallel.cuts.batch import BatchSplit
from partsong.parallel.exchange.borders import Borders, SyncBorders
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, sample_of
from partsong.parallel.hooks.replaced_method import Followed
from partsong.parallel.plan.denoiser import Denoiser
from partsong.parallel.plan.explain import Explanation, Seen, explain
from partsong.parallel.ranks.mesh import AXES, Axis, Mesh
from partsong.parallel.ranks.noise import share_latents
from partsong.parallel.strategy import Kind, Strategy, combined_kind, mesh_for, own_loop
from partsong.parallel.vae.autoencoder import AutoencoderParallel

__all__ = ["Plan", "parallelize"]


def parallelize(pipe_or_module: Any, *strategies: Strategy, mesh: Mesh | None = None) -> Plan:
    """Attaches strategies to a diffusers pipeline, or to a transformer or autoencoder of one.

    The object stays the user's: hooks are put on it, and `Plan.undo` takes them off without a trace. Call the
    pipeline as before, with the same arguments on every rank; every rank returns the same output. Without a generator
    the noise is what rank 0 draws: the default generators of the other ranks take over its state.

    Args:
        pipe_or_module: an unmodified diffusers pipeline, its transformer, or its autoencoder for `ParallelVae` alone.
        *strategies: one or more strategies on different mesh axes.
        mesh: the ranks; None makes a mesh that gives each strategy its degree.

    Returns:
        The plan, usable as a context manager that undoes itself.

    Raises:
        ArgumentTypeError: not a pipeline or module.
        ArgumentError: degrees and ranks do not fit.
        UnsupportedError: an architecture or a combination without a correct parallel form.

    Example:
        >>> import torch
        >>> from diffusers import DiTTransformer2DModel
        >>> model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1,
        ...     sample_size=8, num_embeds_ada_norm=10)
        >>> with parallelize(model, Ulysses()) as plan:  # one rank here: the same picture, nothing moved
        ...     plan.kind
        'exact'
    """
    bare = isinstance(pipe_or_module, nn.Module) and strategies and not any(s.denoises for s in strategies)
    modules = [] if bare else _denoisers(pipe_or_module)
    if mesh is None:
        world = dist.get_world_size() if dist.is_initialized() else _world_size()
        mesh, owned = Mesh(**mesh_for(strategies, world)), True
    else:
        owned = False
        _check_against(mesh, strategies)
    return Plan(pipe_or_module, modules, strategies, mesh, owns_mesh=owned)


class Plan:
    """Strategies attached to a pipeline or module.

    Attributes:
        target: the pipeline or module.
        strategies: what was attached.
        mesh: the ranks.
        kind: ``exact``, ``bounded`` or ``approximate``.
        clock: the current step and branch.
        loop: name of the sampler the strategies need; None is the pipeline's own call.
    """

    def __init__(
        self, target: Any, modules: list[nn.Module], strategies: tuple[Strategy, ...], mesh: Mesh, *, owns_mesh: bool
    ) -> None:
        self.target, self.strategies, self.mesh = target, strategies, mesh
        self.kind: Kind = combined_kind(strategies)
        self.clock = StepClock()
        self.seen = Seen()
        self._owns_mesh, self._hooks = owns_mesh, HookSet()
        self._patched: list[tuple[Any, str]] = []
        self._steps_copies = False
        self.denoisers: list[Denoiser] = []
        self.coders: list[AutoencoderParallel] = []
        self.loop: str | None = None
        self._in_loop = False
        try:
            for module in modules:
                self.denoisers.append(Denoiser(self, module, self._hooks))
            self.loop = own_loop(strategies, mesh, target, modules)
            self.coders = [coder for s in strategies if (coder := s.codes(target, mesh)) is not None]
            for coder in self.coders:
                coder.attach(self._hooks, self.clock)
            if not isinstance(target, nn.Module):
                self._follow_pipeline(target)
        except BaseException:
            self.undo()
            raise

    def stages(self) -> list[Stage]:
        """The chain of attention stages, outermost call first; axes of one rank add none."""
        chain: list[tuple[int, Stage]] = []
        for strategy in self.strategies:
            made = strategy.stages(self.mesh, self.clock)
            chain += [(AXES.index(stage.axis.name), stage) for stage in made if stage.axis.size > 1]
        chain.sort(key=lambda link: -link[0])
        names = [stage.axis.name for _, stage in chain]
        if "ring" in names and "patch" in names:
            raise UnsupportedError("patches and a ring cannot share an attention; combine either with Ulysses")
        return [stage for _, stage in chain]

    def borders(self) -> Borders:
        """How ranks that hold neighbouring rows of an image come to know of each other's."""
        axis = self.mesh.axis(*TOKEN_AXES)
        made = [borders for s in self.strategies if (borders := s.borders(axis, self.clock)) is not None]
        return made[0] if made else SyncBorders(axis)

    @contextmanager
    def looping(self) -> Iterator[None]:
        """Inside, the sampler named by `loop` may call the model."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False

    def check_loop(self) -> None:
        """Refuses a call of the pipeline or the model that does not come from the plan's sampler."""
        if self.loop is not None and not self._in_loop:
            names = " and ".join(type(strategy).__name__ for strategy in self.strategies)
            raise ArgumentError(
                f"{names} samples with a loop of its own: use generate(plan, ...) of partsong.samplers instead of "
                "calling the pipeline"
            )

    def _check_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_inputs(*args: Any, **kwargs: Any) -> Any:
            self.check_loop()
            return original(*args, **kwargs)

        return check_inputs

    def _follow_pipeline(self, pipe: Any) -> None:
        scheduler = getattr(pipe, "scheduler", None)
        if scheduler is None:
            return
        if self.loop is not None:
            # The sampler runs copies of the pipeline with schedulers of their own, and drives the clock itself.
            if hasattr(pipe, "check_inputs"):
                self._wrap(pipe, "check_inputs", self._check_before)
            return
        self.clock.driven = True
        self._wrap(scheduler, "set_timesteps", self._begin_after, self._begin_copy_after)
        self._wrap(scheduler, "step", self._advance_after, self._advance_copy_after)
        if hasattr(pipe, "prepare_latents"):
            self._wrap(pipe, "prepare_latents", self._share_latents_after)
        elif hasattr(scheduler, "scale_model_input"):
            # The pipeline draws its latents inline, as DiT's does: here they are seen first.
            self._wrap(scheduler, "scale_model_input", self._share_latents_before)
        decoder = getattr(getattr(pipe, "vae", None), "decoder", None)
        axis = self.mesh.axis("data")
        if decoder is not None and axis.size > 1 and not self.coders:
            self._hooks.add(decoder, _decoder_hook(axis, decoder, self.seen), "data")

    def _wrap(
        self, owner: Any, name: str, after: Callable[[Any], Callable[..., Any]], after_copies: Any = None
    ) -> None:
        if name in vars(owner):
            raise UnsupportedError(f"{type(owner).__name__}.{name} is already replaced on this object; undo that first")
        setattr(owner, name, Followed(owner, name, after, after_copies))
        self._patched.append((owner, name))

    def _begin_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_timesteps(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.seen.decoded.clear()
            self._steps_copies = False
            self.clock.begin(original.__self__.timesteps.tolist())  # type: ignore[attr-defined]
            return result

        return set_timesteps

    def _begin_copy_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A scheduler per frame: how many steps there will be, only the pipeline knows."""

        def set_timesteps(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.clock.begin()
            return result

        return set_timesteps

    def _advance_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.clock.step == 0:
                # Not every scheduler takes the timestep in the same place.
                self.clock.begun_at(signature.bind(*args, **kwargs).arguments["timestep"])
            if self.clock.is_called or not self._steps_copies:
                self._end_step()
            return result

        return step

    def _advance_copy_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A scheduler per frame: all of them together make one step, after the model's calls for it."""

        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._steps_copies = True
            if self.clock.is_called:
                self._end_step()
            return result

        return step

    def _end_step(self) -> None:
        self.clock.advance()
        self.close_record()

    def close_record(self) -> None:
        """Ends the ledger's record of a step."""
        active = ledger.active()
        if active is not None:
            active.step()

    def _share_latents_after(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            latents = result[0] if isinstance(result, tuple) else result
            if not isinstance(latents, Tensor):
                return result
            shared = self._shared(latents)
            return (shared, *result[1:]) if isinstance(result, tuple) else shared

        return prepare_latents

    def _share_latents_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale_model_input(sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(self._shared(sample) if self.clock.step == 0 else sample, *args, **kwargs)

        return scale_model_input

    def _shared(self, latents: Tensor) -> Tensor:
        self.seen.latents_bytes = latents.numel() * latents.element_size()
        return share_latents(self.mesh.axis(*AXES), latents)

    def explain(self) -> Explanation:
        """What is split, stale and moved, in bytes per step and rank, for the shapes of the last generation.

        Raises:
            ArgumentError: this rank has sampled nothing under this plan, so the shapes are not known.
        """
        if not any(denoiser.seen.known for denoiser in self.denoisers) and not any(c.known for c in self.coders):
            raise ArgumentError(
                "call the pipeline once before explain(): the bytes depend on the picture's size, and this rank has "
                "computed nothing under this plan yet (a run taken up again may find all of its work done)"
            )
        return explain(self)

    def undo(self) -> None:
        """Waits for what is under way and takes every hook off; may be called again."""
        self.clock.begin()
        self._hooks.remove()
        for owner, name in reversed(self._patched):
            vars(owner).pop(name, None)
        self._patched.clear()
        if self._owns_mesh:
            self.mesh.close()
            self._owns_mesh = False

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        self.undo()

    def abandon(self) -> None:
        """Drops messages under way without waiting, after an error."""
        for denoiser in self.denoisers:
            if denoiser.sequence is not None:
                denoiser.sequence.abandon()


def _decoder_hook(axis: Axis, decoder: nn.Module, seen: Seen) -> AroundHook:
    signature = inspect.signature(decoder.forward)
    first = next(iter(signature.parameters))
    split = BatchSplit(axis, (first,))

    def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        total = named[first].shape[0]
        if total < 2:
            return forward(**named)
        output = split.run(forward, named, named[first])
        seen.decoded.append((total, sample_of(output)[0].numel() * sample_of(output).element_size()))
        return output

    return AroundHook(run, signature)


def _denoisers(target: Any) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        adapter_for(target)
        return [target]
    if not hasattr(target, "components"):
        raise ArgumentTypeError(
            f"parallelize() takes a diffusers pipeline or a transformer module, not {type(target).__name__}"
        )
    found = [getattr(target, name, None) for name in ("transformer", "transformer_2", "unet")]
    modules = [module for module in found if isinstance(module, nn.Module)]
    if not modules:
        held = ", ".join(sorted(name for name, part in target.components.items() if isinstance(part, nn.Module)))
        raise UnsupportedError(f"{type(target).__name__} has no denoiser to parallelize; it holds {held}")
    for module in modules:
        adapter_for(module)
    return modules


def _check_against(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    wanted = {axis: degree for s in strategies for axis, degree in s.wanted().items()}
    used = {axis for axis, degree in mesh.degrees.items() if degree > 1}
    used -= set() if all(s.denoises for s in strategies) else {"data"}
    for axis in used - wanted.keys():
        raise ArgumentError(f"the mesh has {axis}={mesh.degrees[axis]}, but no strategy uses that axis")
    for axis, degree in wanted.items():
        if degree is not None and degree != mesh.degrees[axis]:
            raise ArgumentError(f"a strategy asks for {axis}={degree}, the mesh has {axis}={mesh.degrees[axis]}")
    mesh_for(strategies, mesh.world_size)  # the checks on the strategies themselves


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
