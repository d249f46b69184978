"""Runs on every rank: plans in which an error is raised at a chosen point, and what is left of the pipeline then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from diffusers.utils import logging
from torch import Tensor, nn

from partsong import SyncPatch, Ulysses
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.sharded_weights import torch_shards
from tests.features.groups import GROUPS
from tests.parallel.ranks import gathered, on_first
from tests.pipelines.case import Case, Through, denoisers, distance
from tests.pipelines.cases import CASES

#: Every strategy with a pipeline that it runs.
PLANS: dict[str, tuple[str, tuple[Strategy, ...]]] = {
    **{name: ("StableDiffusion3Pipeline", strategies) for name, strategies in GROUPS.items()},
    "SyncPatch of rows": ("StableDiffusionPipeline", (SyncPatch(),)),
    "ShardedWeights of rows": ("StableDiffusionPipeline", GROUPS["ShardedWeights"]),
    "ShardedWeights beside Ulysses": ("StableDiffusion3Pipeline", (*GROUPS["ShardedWeights"], Ulysses())),
}
#: Where an error is raised, in percent of the hooks that are put on, and in the how manieth call of what.
POINTS = (
    *("hook 0 %", "hook 50 %", "hook 100 %"),
    *("model 1", "model 2", "first layer 1", "middle layer 1", "middle layer 2", "last layer 1"),
    *("exchange 1", "exchange 9", "decoder 1"),
)
#: Strategies whose ranks run other blocks than each other: an error in a layer is an error of one rank.
BY_BLOCKS = ("PatchPipeline", "LayerPipeline", "LaggedLayers", "TimeParallel", "DraftedSteps")
CELLS = [
    (plan, point)
    for plan in PLANS
    for point in POINTS
    if plan not in BY_BLOCKS or point[:5] in ("hook ", "model", "decod")
    if not (point == "model 2" and plan in ("TimeParallel", "DraftedSteps"))  # a later point of one rank alone
]


class Injected(Exception):
    """Is no error of partsong or of torch."""


class Fuse:
    """Raises an error once, at a number of its calls."""

    def __init__(self, at: float) -> None:
        self.at, self.calls = at, 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise Injected


def outcomes(nproc: int, cells: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What each cell, a plan and a point, leaves behind on each rank."""
    logging.set_verbosity_error()
    results = {}
    with Mesh(data=nproc):
        for name in dict.fromkeys(name for name, _ in cells):
            case, strategies = CASES[PLANS[name][0]], PLANS[name][1]
            want = on_first(lambda case=case: _picture(case, case.make()))
            for cell in (cell for cell in cells if cell[0] == name):
                results[cell] = gathered(_outcome(case, strategies, cell[1], want))
    return results


def _outcome(case: Case, strategies: tuple[Strategy, ...], point: str, want: list[Tensor]) -> dict[str, Any]:
    pipe = case.make()
    kind, _, number = point.removesuffix(" %").rpartition(" ")
    fuse = Fuse(int(number))
    watch = _watched(pipe, kind, fuse)
    before = _looks(pipe)
    found: dict[str, Any] = {"raised": 0, "under": 0.0}
    with Mesh(**mesh_for(strategies, dist.get_world_size())) as mesh:
        try:
            if kind == "hook":
                with _at_hooks(fuse, lambda: parallelize(pipe, *strategies, mesh=mesh)):
                    parallelize(pipe, *strategies, mesh=mesh)
            with parallelize(pipe, *strategies, mesh=mesh) as plan:
                _at_exchanges(fuse if kind == "exchange" else Fuse(0), mesh)
                try:
                    _picture(case, Through(plan))
                except Injected:
                    found["raised"] += 1
                    found["under"] = distance(_picture(case, Through(plan)), want)
                    raise
        except Injected:
            found["raised"] += 1
        found["reached"] = fuse.calls >= fuse.at
        found["changed"] = _differences(before, _looks(pipe))
        found["after"] = distance(_picture(case, pipe), want)
    if watch is not None:
        watch.remove()
    return found


def _picture(case: Case, pipe: Any) -> list[Tensor]:
    return case.run(pipe, output_type="pt")


def _watched(pipe: Any, kind: str, fuse: Fuse) -> Any:
    """Lets a module of the pipeline light a fuse in its calls."""
    (model, *_) = denoisers(pipe)
    layers = [layer for layer in model.modules() if not [*layer.children()] and [*layer.parameters()]]
    modules = {
        "model": model,
        "decoder": pipe.vae.decoder,
        "first layer": layers[0],
        "middle layer": layers[len(layers) // 2],
        "last layer": layers[-1],
    }
    return modules[kind].register_forward_pre_hook(fuse) if kind in modules else None


@contextmanager
def _at_hooks(fuse: Fuse, attach: Callable[[], Any]) -> Iterator[None]:
    """Lights a fuse whenever a hook or an attribute is put on, at the percentage of them that is its number."""
    named = [(HookSet, "add"), (HookSet, "put"), (HookSet, "on_remove"), (torch_shards, "_put_on")]
    functions = [(owner, name, getattr(owner, name)) for owner, name in named]

    def light(burning: Fuse) -> None:
        for owner, name, function in functions:
            # Registering what undoes a change comes after the change, and does not fail itself.
            setattr(owner, name, _burning(burning, function, late=name == "on_remove"))

    try:
        light(counter := Fuse(0))
        attach().undo()
        fuse.at = max(1, math.ceil(counter.calls * fuse.at / 100))
        light(fuse)
        yield
    finally:
        for owner, name, function in functions:
            setattr(owner, name, function)


def _burning(fuse: Fuse, function: Callable[..., Any], late: bool) -> Callable[..., Any]:
    def act(*args: Any) -> Any:
        if not late:
            fuse()
        done = function(*args)
        if late:
            fuse()
        return done

    return act


def _at_exchanges(fuse: Fuse, mesh: Mesh) -> None:
    """Lights a fuse whenever an exchange begins."""

    for axis in mesh._axes.values():
        object.__setattr__(axis, "calls", _Numbers(fuse, axis.calls))


class _Numbers:
    def __init__(self, fuse: Fuse, before: Iterator[int]) -> None:
        self.fuse, self.before = fuse, before

    def __next__(self) -> int:
        number = next(self.before)
        self.fuse()
        return number

    def __iter__(self) -> Iterator[int]:
        return self


def _looks(pipe: Any) -> dict[str, Any]:
    """What plans change in a pipeline: attributes, classes, weights."""
    looks: dict[str, Any] = {"pipeline": _replaced(pipe)}
    for part, component in pipe.components.items():
        looks[part] = _replaced(component)
        for name, module in component.named_modules() if isinstance(component, nn.Module) else ():
            plain = {key: value for key, value in vars(module).items() if type(value) in (int, float, bool, str)}
            hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
            own = [(key, id(weight)) for key, weight in module.named_parameters(recurse=False)]
            looks[f"{part}.{name}"] = (type(module), sorted(vars(module)), plain, hooks, own)
    return looks


def _replaced(thing: Any) -> list[str]:
    return [name for name, value in getattr(thing, "__dict__", {}).items() if callable(value)]


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
