"""Attaches strategies to a pipeline or module, and takes them off again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch.distributed as dist
from torch import nn

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.model_folders import DENOISERS
from partsong.parallel.adapters import Adapter, adapter_for
from partsong.parallel.hooks.kept_objects import allow_copies, refuse_copies
from partsong.parallel.hooks.model_hooks import Hook, HookSet
from partsong.parallel.hooks.replaced_method import ReplacedMethods
from partsong.parallel.plan.attached import Attached
from partsong.parallel.plan.changes import Renewal, watch_changes, without_model_offload
from partsong.parallel.plan.checks import check_same
from partsong.parallel.plan.control import ControlNet, cut_controlnets, single_parts
from partsong.parallel.plan.denoiser import Denoiser
from partsong.parallel.plan.explain import Explanation, bytes_by_step, explain
from partsong.parallel.plan.follow import calling_pipeline, follow_pipeline
from partsong.parallel.plan.neighbours import refused_change
from partsong.parallel.plan.state import PlanState
from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.strategy import Coder, Strategy, check_strategies, mesh_for, own_loop, refuse_shares
from partsong.parallel.text.plan import TextPlan, is_text_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Plan", "parallelize"]


@overload
def parallelize(pipe_or_module: PreTrainedModel, *strategies: Strategy, mesh: Mesh | None = None) -> TextPlan: ...


@overload
def parallelize(
    pipe_or_module: Any, *strategies: Strategy, mesh: Mesh | None = None, adapter: Adapter | None = None
) -> Plan: ...


def parallelize(
    pipe_or_module: Any, *strategies: Strategy, mesh: Mesh | None = None, adapter: Adapter | None = None
) -> Plan | TextPlan:
    """Attaches strategies to a diffusers pipeline, to a transformer or autoencoder of one, or to a language model.

    The object stays the user's: hooks are put on it, and `Plan.undo` takes them off without a trace. Call the
    pipeline as before, with the same arguments on every rank; every rank returns the same output. Without a generator
    the noise is what rank 0 draws: the default generators of the other ranks take over its state.

    Args:
        pipe_or_module: an unmodified diffusers pipeline, its transformer, or its autoencoder for `ParallelVae` only; or
            a causal, masked or block-diffusion language model of transformers for `TensorParallel`, `ShardedWeights` or
            `LayerPipeline`.
        *strategies: one or more strategies on different mesh axes.
        mesh: the ranks; None makes a mesh that gives each strategy its degree.
        adapter: what partsong has to know of a model of your own (docs/support.md); ``model`` is its class name. The
            first call with each number of samples is compared with that of one rank, and refused if they differ.
            None takes the row that partsong has, or infers one.

    Returns:
        The plan, usable as a context manager that undoes itself; a `TextPlan` for a language model.

    Raises:
        ArgumentTypeError: not a pipeline or module, or not an `Adapter`.
        ArgumentError: degrees and ranks do not fit, or the adapter names what the model does not have.
        UnsupportedError: an architecture or a combination without a correct parallel form.

    Example:
        >>> import torch
        >>> from diffusers import DiTTransformer2DModel
        >>> model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1,
        ...     sample_size=8, num_embeds_ada_norm=10)
        >>> from partsong import Ulysses
        >>> with parallelize(model, Ulysses()) as plan:  # one rank here: the same picture, nothing moved
        ...     plan.kind
        'exact'
    """
    if isinstance(pipe_or_module, nn.Module):
        _refuse_wrapped(pipe_or_module)
    is_text = is_text_model(pipe_or_module)
    if is_text and adapter is not None:
        raise ArgumentError("an adapter describes a model of diffusers; leave it out with a language model")
    bare = isinstance(pipe_or_module, nn.Module) and strategies and not any(s.denoises for s in strategies)
    modules = [] if bare or is_text else _denoisers(pipe_or_module, adapter)
    if mesh is None:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        mesh, owned = Mesh(**mesh_for(strategies, world)), True
    else:
        owned = False
        _check_against(mesh, strategies)
    if is_text:
        return TextPlan(pipe_or_module, strategies, mesh, owns_mesh=owned)
    return Plan(pipe_or_module, modules, strategies, mesh, owns_mesh=owned, adapter=adapter)


class Plan(PlanState, Attached):
    """Holds strategies attached to a pipeline or module, until `undo` takes them off.

    Attributes:
        target: the pipeline or module.
        denoisers: its denoisers under the plan.
        controlnets: its ControlNets that are cut like the denoisers.
        coders: the strategies' work on its autoencoder and its text encoders.
        strategies: what was attached.
        mesh: the ranks.
        kind: ``exact``, ``bounded`` or ``approximate``.
        clock: the current step and branch.
        loop: the strategy whose own sampling loop must be used; None where the pipeline's own call samples.
    """

    def __init__(
        self,
        target: Any,
        modules: list[nn.Module],
        strategies: tuple[Strategy, ...],
        mesh: Mesh,
        *,
        owns_mesh: bool,
        adapter: Adapter | None = None,
    ) -> None:
        refuse_shares(strategies, mesh.degrees, mesh.shares)
        super().__init__(strategies, mesh, adapter)
        self.target, self._modules, self._owns_mesh = target, modules, owns_mesh
        self._hooks, self._methods = HookSet(), ReplacedMethods()
        self._under = {name: part for name, part in self._components.items() if any(part is each for each in modules)}
        self.denoisers: list[Denoiser] = []
        self.controlnets: list[ControlNet] = []
        self.coders: list[Coder] = []
        self._applied: list[Callable[[], None]] = []
        self._put_on()

    def _put_on(self) -> None:
        """Puts every hook on the models' present layers."""
        self.denoisers, self.controlnets, self.coders = [], [], []
        self.is_undone = False
        try:
            check_same(self.mesh.axis(*AXES), self._modules, [*single_parts(self._components)])
            with without_model_offload(self.target):
                self._attach()
            owners = [*self._modules] if isinstance(self.target, nn.Module) else [self.target, *self._modules]
            renewal = Renewal(self._take_off, self._put_on, self._refuses_change, lambda: self.is_ending)
            watch_changes(renewal, owners, self._methods)
            refuse_copies(self.target)
            self._hooks.on_remove(lambda: allow_copies(self.target))
            for change in self._applied:
                change()
        except BaseException:
            self.abandon()
            self.undo()
            raise

    def _attach(self) -> None:
        target, strategies = self.target, self.strategies
        others = [part for part in single_parts(self._components) if part not in self._modules]
        self.lent = frozenset(module for part in others for module in part.modules())
        for module in self._modules:
            self.denoisers.append(Denoiser(self, module, self._hooks))
            _refuse_pipeline(target, self.denoisers[-1])
        self.loop = own_loop(strategies, self.mesh, target, self._modules)
        self._cut_controlnets()
        self._keep_from_others()
        self.coders = [coder for s in strategies if (coder := s.codes(target, self.mesh)) is not None]
        for coder in self.coders:
            coder.attach(self._hooks, self.clock)
        if not isinstance(target, nn.Module):
            shares_decoder = not any(coder.decodes for coder in self.coders)
            caller = target if self.loop is not None else calling_pipeline(target, self._modules)
            follow_pipeline(self, caller, self._hooks, self._methods, shares_decoder=shares_decoder)

    def _take_off(self) -> None:
        """Waits for pending messages and takes every hook off."""
        try:
            self.clock.begin()
        finally:
            self._methods.restore()
            with without_model_offload(self.target):
                self._hooks.remove()
            self.clock.forget_callbacks()
            self.scheduler = None

    def _refuses_change(self, name: str, given: tuple[Any, ...]) -> str | None:
        """Says why a change of the models cannot be made under this plan; None where it can."""
        reasons = (refused_change(denoiser, name, given) for denoiser in self.denoisers)
        return next((reason for reason in reasons if reason is not None), None)

    def _cut_controlnets(self) -> None:
        """Cuts the ControlNets of a pipeline whose scheduler tells the step."""
        if isinstance(self.target, nn.Module) or getattr(self.target, "scheduler", None) is None or self.loop:
            return
        self.controlnets = cut_controlnets(self, self.target.components, self.denoisers, self._hooks)
        for denoiser in self.denoisers:
            denoiser.has_shares = bool(self.controlnets)

    @property
    def _components(self) -> dict[str, Any]:
        return {} if isinstance(self.target, nn.Module) else self.target.components

    def check_parts(self) -> None:
        """Refuses a pipeline whose denoiser is not the one under this plan any more.

        Raises:
            UnsupportedError: names the part that was replaced.
        """
        for name, module in self._under.items():
            now = getattr(self.target, name)
            if module not in (now, getattr(now, "_orig_mod", now)):
                raise UnsupportedError(
                    f"the {name} of this {type(self.target).__name__} was replaced after parallelize(), and the new "
                    "one would run whole on every rank; call undo() and parallelize() again"
                )

    def _keep_from_others(self) -> None:
        """Keeps the hooks out of calls of other parts of the pipeline, such as a ControlNet that shares layers."""
        hooked = {under.module for under in (*self.denoisers, *self.controlnets)}
        for part in single_parts(self._components):
            if part not in hooked:
                self._hooks.keep_from(part)

    def explain(self) -> Explanation:
        """Says what is split, stale and moved, in bytes per step and rank, for the shapes of the last generation.

        Raises:
            ArgumentError: this rank has sampled nothing under this plan, so the shapes are not known.
        """
        if not any(denoiser.seen.known for denoiser in self.denoisers) and not any(c.known for c in self.coders):
            raise ArgumentError(
                "call the pipeline once before explain(): the bytes depend on the picture's size, and this rank has "
                "computed nothing under this plan yet (a run taken up again may find all of its work done)"
            )
        return explain(self, self.denoisers, self.coders, self.controlnets)

    def end_call(self) -> None:
        """Notes that the pipeline's call is over, so no step follows the last one."""
        super().end_call()
        for denoiser in self.denoisers:
            denoiser.guidance.expected.check()

    def end_part(self) -> None:
        """Remembers what the steps so far have sent."""
        if any(denoiser.seen.known for denoiser in self.denoisers):
            # A call after the last step, such as one that fills a cache, counts as a step.
            steps = self.clock.step + self.clock.is_called
            self.finished += bytes_by_step(self, self.denoisers, self.controlnets, steps)
            self.seen.check_bytes += sum(denoiser.seen.check_bytes for denoiser in self.denoisers)

    def hooks_of(self, kind: type[Hook]) -> list[Hook]:
        """Lists the hooks of a class that this plan has put on modules."""
        return self._hooks.of(kind)

    def apply(self, change: Callable[[], None]) -> None:
        """Makes a change of the models that goes with the hooks: now, and whenever they are put on again."""
        change()
        self._applied.append(change)

    def on_take_off(self, undo: Callable[[], None]) -> None:
        """Registers a function to call when the hooks are taken off."""
        self._hooks.on_remove(undo)

    def adopt_mesh(self) -> None:
        """Lets `undo` close the mesh too."""
        self._owns_mesh = True

    def undo(self) -> None:
        """Waits for pending messages and takes every hook off; may be called again."""
        self.is_undone = True
        try:
            self._take_off()
        finally:
            if self._owns_mesh:
                self.mesh.close()
                self._owns_mesh = False

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error; `undo` then expects nothing of other ranks."""
        self._hooks.has_failed = True
        self.mesh.abandon()
        for under in (*self.denoisers, *self.controlnets):
            under.abandon()


def _denoisers(target: Any, given: Adapter | None) -> list[nn.Module]:
    modules = [target] if isinstance(target, nn.Module) else _parts(target)
    for module in modules:
        _refuse_wrapped(module)
    if given is not None:
        _check_given(given, modules)
    for module in modules:
        adapter_for(module, given)
    return modules


def _check_given(given: Adapter, modules: list[nn.Module]) -> None:
    if not isinstance(given, Adapter):
        raise ArgumentTypeError(f"adapter={given!r} is not a row; give a partsong.parallel.Adapter")
    names = [type(module).__name__ for module in modules]
    if given.model not in names:
        raise ArgumentError(f"the adapter is for a model={given.model!r}, and this one is {' and '.join(names)}")


def _parts(target: Any) -> list[nn.Module]:
    """Lists the denoisers of a pipeline."""
    if not hasattr(target, "components"):
        raise ArgumentTypeError(
            f"parallelize() takes a diffusers pipeline or a transformer module, not {type(target).__name__}"
        )
    # A prior is a denoiser too, but it has a loop and a scheduler of its own beside the main one.
    for names in (DENOISERS, ("prior",), ("decoder",)):
        parts = [getattr(target, name, None) for name in names]
        if modules := [part for part in parts if isinstance(part, nn.Module)]:
            break
    else:
        held = ", ".join(sorted(name for name, part in target.components.items() if isinstance(part, nn.Module)))
        raise UnsupportedError(f"{type(target).__name__} has no denoiser to parallelize; it holds {held}")
    return modules


def _refuse_pipeline(target: Any, denoiser: Denoiser) -> None:
    for method, reason in denoiser.adapter.refused_pipelines.items():
        if denoiser.cut is not None and hasattr(target, method):
            raise UnsupportedError(f"{type(target).__name__}: {reason}")


def _refuse_wrapped(module: nn.Module) -> None:
    # The class is not imported for this: that takes as long as all of torch.
    if type(module).__name__ == "OptimizedModule":
        name = type(module._orig_mod).__name__
        raise UnsupportedError(
            f"this {name} was wrapped by torch.compile(), and a plan needs the model itself; put the {name} back and "
            "call its own method compile(), before or after parallelize()"
        )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        name, wrapper = type(module.module).__name__, type(module).__name__
        raise UnsupportedError(
            f"this {name} is wrapped in {wrapper}, and a plan needs the model itself; pass its .module, or put that in "
            f"the place of the {wrapper} in the pipeline"
        )


def _check_against(mesh: Mesh, strategies: tuple[Strategy, ...]) -> None:
    asked = check_strategies(strategies)
    used = {axis for axis, degree in mesh.degrees.items() if degree > 1}
    used -= {"data"} if any(s.uses_all_ranks for s in strategies) else set()
    for axis in used - asked.keys():
        raise ArgumentError(f"the mesh has {axis}={mesh.degrees[axis]}, but no strategy uses that axis")
    for axis, degree in asked.items():
        if degree is not None and degree != mesh.degrees[axis]:
            raise ArgumentError(f"a strategy asks for {axis}={degree}, the mesh has {axis}={mesh.degrees[axis]}")
