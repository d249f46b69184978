"""What a caller passes by position or by keyword reaches the model that way, under every hook on every model."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from partsong import ClipParallel, DisplacedPatch, LaggedLayers, StepCache, Ulysses
from partsong.parallel import Strategy, mesh_for
from partsong.parallel.adapters import adapter_for
from partsong.parallel.hooks.arguments import ArgumentNames, AsCalled
from partsong.parallel.hooks.model_hooks import signature_of
from partsong.parallel.plan.dry_run import DryMesh
from partsong.parallel.plan.plan import Plan
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import call_form_worker
from tests.parallel.call_form_worker import Form
from tests.parallel.families import FAMILIES, adapter_of
from tests.parallel.test_real_sizes import SIZES
from tests.parallel.unets import UNETS

#: Each puts other hooks on the whole model or on its blocks; and the ranks it takes.
STRATEGIES: tuple[tuple[Strategy, int], ...] = (
    (Ulysses(), 2),
    (DisplacedPatch(), 2),
    (StepCache(), 1),
    (ClipParallel(), 2),
    (LaggedLayers(), 2),
)
#: Rows that no family has, on models of published size: these take seconds.
OTHERS = sorted(SIZES.keys() - {adapter_of(name).model for name in FAMILIES}) if covering.FULL else []


class Reached(Exception):
    """Ends a call where the model itself would begin."""


def subject(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its arguments for one call."""
    if name in FAMILIES:
        return FAMILIES[name].model(8, torch.float32), FAMILIES[name].call(8, 1, torch.float32)
    if name in UNETS:
        return UNETS[name].model(torch.float32), UNETS[name].calls((16, 16), torch.float32, (900.0,))[0]
    return SIZES[name].build(), SIZES[name].inputs(1)


def reached(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """How many positions and which keywords reached the model."""
    with torch.no_grad(), pytest.raises(Reached) as end:
        model(*args, **kwargs)
    return end.value.args


@pytest.mark.parametrize("name", [*FAMILIES, *(UNETS if covering.FULL else ("SD", "AnimateDiff")), *OTHERS])
def test_positions_stay_positions_and_keywords_keywords(name: str) -> None:
    model, inputs = subject(name)

    def record(*args: Any, **kwargs: Any) -> Any:
        raise Reached(len(args), set(kwargs))

    vars(model)["forward"] = record
    first = next(iter(signature_of(model).parameters))
    by_keyword = {name: value for name, value in inputs.items() if name != first}
    calls = [((), inputs), ((inputs[first],), by_keyword)] if first in inputs else [((), inputs)]
    for strategy, ranks in STRATEGIES:
        if strategy.refuses(adapter_for(model)) is not None:
            continue
        mesh: Any = DryMesh(mesh_for((strategy,), ranks), ranks)
        with Plan(model, [model], (strategy,), mesh, owns_mesh=False) as plan:
            plan.clock.driven = True
            for args, kwargs in calls:
                assert reached(model, args, kwargs) == (len(args), set(kwargs)), strategy


@functools.cache
def on_ranks() -> tuple[dict[str, list[tuple[set[Form], set[Form]]]], dict[str, list[tuple[float, float]]]]:
    return launch(call_form_worker.on_ranks, 2)


@pytest.mark.parametrize("strategy", call_form_worker.LOOPS)
def test_loops_pass_arguments_as_the_pipeline_does(strategy: str) -> None:
    for alone, split in on_ranks()[0][strategy]:
        assert alone == split


@pytest.mark.parametrize("strategy", call_form_worker.SCALED)
def test_the_scale_of_a_lora_in_a_call_is_heard(strategy: str) -> None:
    for from_serial, from_full_scale in on_ranks()[1][strategy]:
        assert from_serial < 1e-10
        assert from_full_scale > 1e-3


def forward(x: int, /, t: int, *rest: int, scale: float = 1.0, **more: Any) -> Any:
    return x, t, rest, scale, more


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1, 2), {}), ((1,), {"t": 2}), ((1, 2, 3, 4), {"scale": 0.5}), ((1, 2), {"other": 3})]
)
def test_arguments_of_every_kind_come_back(args: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    names = ArgumentNames(inspect.signature(forward))
    named = names.of(args, kwargs)
    assert names.passed(named, names.positions(args)) == (args, kwargs)
    assert AsCalled(forward, names, names.positions(args))(**named) == forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1,), {}), ((1, 2), {"t": 2}), ((1, 2, 3), {"w": 1}), ((1, 2, 3, 4), {})],
)
def test_a_call_that_does_not_fit_is_refused_as_python_does(args: tuple[int, ...], kwargs: dict[str, Any]) -> None:
    signature = inspect.signature(lambda x, t, w=0: None)
    with pytest.raises(TypeError) as own:
        ArgumentNames(signature).of(args, kwargs)
    with pytest.raises(TypeError) as python:
        signature.bind(*args, **kwargs)
    assert str(own.value) == str(python.value)
