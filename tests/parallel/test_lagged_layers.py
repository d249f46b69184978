"""LaggedLayers: its definition, the same bits on any ranks, and the model itself where nothing lags."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from partsong import CfgParallel, LaggedLayers, StepCache, Ulysses, UnsupportedError, mesh_for, parallelize, predict
from partsong.errors import ArgumentError
from partsong.ledger import Ledger
from partsong.parallel import ADAPTERS
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import lagged_worker
from tests.parallel.equivalence_worker import compared
from tests.parallel.families import FAMILIES
from tests.parallel.lagged_worker import BLOCKS, KNOBS
from tests.parallel.ranks import error
from tests.pipelines.case import distance
from tests.pipelines.cases import CASES, cases_beside

#: What several ranks make by default: knobs take turns with models.
USUAL = {
    2: {("SD3", label) for label in KNOBS} | {("SD3", "three"), ("Wan", "window"), ("Wan", "held"), ("Flux", "stride")},
    3: {("SD3", "held"), ("SD3", "extrapolated"), ("SD3", "stride")},
    4: {("Wan", "guidance")},
}
#: What one rank makes besides: other tests read it.
ALONE = {("Wan", "extrapolated"), *itertools.product(BLOCKS, ("held", "all steps are warm-up"))}


@functools.cache
def results(nproc: int) -> dict[Any, Any]:
    some = None if covering.FULL else USUAL.get(nproc, USUAL[2] | ALONE)
    return lagged_worker.run(1, some) if nproc == 1 else launch(lagged_worker.run, nproc, nproc, some)


#: By default the numbers of runs take turns with the knobs.
DEFINED = [
    pytest.param(label, components, marks=[] if (place + components) % 2 else [pytest.mark.full])
    for place, label in enumerate(KNOBS)
    for components in (2, 3)
]


@pytest.mark.parametrize(("label", "components"), DEFINED)
def test_one_rank_is_the_definition(label: str, components: int) -> None:
    knobs = LaggedLayers(components=components, **KNOBS[label])
    pipe = lagged_worker.pipeline("SD3")
    with parallelize(pipe, knobs):
        got = lagged_worker.call("SD3", pipe)
    assert error(got, lagged_worker.twin(knobs)) <= 1e-12


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.full)])
def test_any_ranks_give_the_same_bits(nproc: int) -> None:
    for case, made in results(nproc).items():
        alone = results(1) if nproc == 2 else _three(case[1])
        assert all(torch.equal(output, alone[case].outputs[0]) for output in made.outputs), case
        assert made.sent == made.predicted, case


@functools.cache
def _three(label: str) -> dict[Any, Any]:
    """What one rank makes in three runs."""
    pipe = lagged_worker.pipeline("SD3")
    with parallelize(pipe, LaggedLayers(components=3, **KNOBS[label])):
        return {("SD3", label): lagged_worker.Made([lagged_worker.call("SD3", pipe)], [], [])}


def test_guidance_is_shared_out_beside_it() -> None:
    made = results(4)["Wan", "guidance"]
    assert all(error(output, results(1)["Wan", "extrapolated"].outputs[0]) <= 1e-12 for output in made.outputs)
    assert made.sent == made.predicted


@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_lags_in_the_warm_up(name: str) -> None:
    plain = lagged_worker.call(name, lagged_worker.pipeline(name))
    assert torch.equal(results(1)[name, "all steps are warm-up"].outputs[0], plain)
    assert not torch.equal(results(1)[name, "held"].outputs[0], plain)


def test_steps_that_are_not_computed_cost_nothing() -> None:
    flops = []
    for knobs in (KNOBS["all steps are warm-up"], KNOBS["stride"]):
        pipe = lagged_worker.pipeline("SD3")
        with parallelize(pipe, LaggedLayers(**knobs)), Ledger() as ledger:
            lagged_worker.call("SD3", pipe)
        flops.append(ledger.summary()["flops"])
    # One step of the warm-up and three of the others are computed, of seven. Embeddings are computed twice.
    assert 4 / 7 <= flops[1] / flops[0] <= 4.1 / 7


def test_a_window_to_the_end_is_none() -> None:
    outputs = []
    for window in (None, lagged_worker.STEPS):
        pipe = lagged_worker.pipeline("SD3")
        with parallelize(pipe, LaggedLayers(components=3, warmup_steps=2, window=window)):
            outputs.append(lagged_worker.call("SD3", pipe))
    assert torch.equal(*outputs)


#: Pipelines of models that are in no family.
OTHERS = cases_beside(LaggedLayers(), {model for name, model in compared() if name == "lagged-layers"})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (place % 2)) for place, name in enumerate(OTHERS)]
)
def test_other_pipelines_lag_after_the_warm_up(name: str) -> None:
    case = CASES[name]
    pipe = case.make()
    wanted = case.run(pipe)
    for warmup_steps in (99, 1):
        with parallelize(pipe, LaggedLayers(warmup_steps=warmup_steps)):
            apart = distance(case.run(pipe), wanted)
        assert apart == 0 if warmup_steps == 99 else 0 < apart < 10
    assert distance(case.run(pipe), wanted) == 0


def test_bytes_are_known_beforehand() -> None:
    model, named = FAMILIES["SD3"].model(8, torch.float64), FAMILIES["SD3"].call(8, 2, torch.float64)
    tokens, text, width = 4 * 5, named["encoder_hidden_states"].shape[1], 24
    entering, output = 2 * (tokens + text) * width * 8, named["hidden_states"].nbytes
    explained = predict(model, LaggedLayers(components=3), ranks=3, **named)
    compared = 4 * 8 * 2
    assert explained.bytes_per_step == [entering + compared, entering + compared, 2 * output + compared]


def test_what_it_cannot_do_is_refused() -> None:
    model = FAMILIES["SD3"].model(8, torch.float64)
    with pytest.raises(ArgumentError, match="3 blocks of SD3Transformer2DModel cannot be 4 runs; use at most 3"):
        parallelize(model, LaggedLayers(components=4))
    with pytest.raises(UnsupportedError, match="LaggedLayers on HunyuanDiT2DModel: long skip connections"):
        parallelize(FAMILIES["HunyuanDiT"].model(8, torch.float64), LaggedLayers())
    for other in (Ulysses(), StepCache()):
        with pytest.raises(UnsupportedError, match=f"does not compose with {type(other).__name__} yet"):
            mesh_for((LaggedLayers(degree=2), other), 2)
    assert mesh_for((LaggedLayers(), CfgParallel()), 4)["pipe"] == 2
    with pytest.raises(ArgumentError, match="warmup_steps=0"):
        mesh_for((LaggedLayers(warmup_steps=0),), 1)
    assert "rows of an image" in str(LaggedLayers().refuses(ADAPTERS["UNet2DConditionModel"]))


def test_more_ranks_than_runs_are_refused_on_all_of_them() -> None:
    said = launch(lagged_worker.refused, 3, 3)
    assert said == ["ArgumentError: LaggedLayers: 3 ranks for 2 runs; use components=3"] * 3


def test_calls_that_leave_blocks_out_are_refused() -> None:
    model, named = FAMILIES["SD3"].model(8, torch.float64), FAMILIES["SD3"].call(8, 1, torch.float64)
    with parallelize(model, LaggedLayers()), pytest.raises(UnsupportedError, match="2 of 3 blocks were called"):
        model(**named, skip_layers=[1])
