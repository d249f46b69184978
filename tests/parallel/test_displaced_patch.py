"""After its warm-up DisplacedPatch is exactly what its definition says, with staleness of exactly one step."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong import DisplacedPatch
from partsong.parallel import predict, predict_memory
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import displaced_worker
from tests.parallel.displaced_worker import CASES, Order
from tests.parallel.memory_worker import flux

#: By default more ranks than cores take one case with the longest memory, and one with the shortest.
MADE = [
    (nproc, case)
    for nproc in (2, 3, 4)
    for case in CASES
    if covering.FULL or nproc == 2 or case in ((1, 1, 0), (3, 2, 1))[: 5 - nproc]
]


@functools.cache  # one launch per number of ranks, each within a test's time limit
def results(nproc: int) -> dict[tuple[int, int, int], list[Any]]:
    return launch(displaced_worker.run, nproc, nproc, [case for ranks, case in MADE if ranks == nproc])


def say(value: Any) -> str:
    return "warm-up {}, {} calls, order {}".format(*value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("nproc", "case"), MADE, ids=say)
def test_equals_its_definition_in_every_step_on_every_rank(nproc: int, case: Any) -> None:
    ranks = results(nproc)[case]
    assert len(ranks) == nproc
    for generations in ranks:
        assert len(generations) == 2, "the second one begins anew"
        for generation in generations:
            assert max(generation["error"]) <= 1e-10


@pytest.mark.parametrize(("nproc", "case"), MADE, ids=say)
def test_drifts_from_serial_only_after_the_warm_up(nproc: int, case: Any) -> None:
    warmup = case[0]
    for generation in results(nproc)[case][0]:
        assert max(generation["drift"][:warmup]) <= 1e-10
        assert all(drift > 1e-6 for drift in generation["drift"][warmup:]), "stale keys must show"


@pytest.mark.parametrize("order", [0, 1])
def test_keeps_all_keys_and_values_once_and_for_a_forecast_its_own_again(order: Order) -> None:
    model, named = flux()
    layers, tokens, numbers = 5, 512 + 32, 2 * 2 * 128
    once = layers * tokens * numbers * 4
    knobs = DisplacedPatch(order=order)
    kept = once * (1 + order / 4)
    assert predict_memory(model, knobs, ranks=4, **named).kept == pytest.approx(kept, rel=0.01)
    assert f"{kept / 1e6:,.1f} MB" in predict(model, knobs, ranks=4, **named).kept[0]
