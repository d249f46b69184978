"""Wires between real ranks: outputs are what the definition says, both ends know the same, and bytes are predicted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from partsong import TokenRing, Ulysses, Usp
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import wires_worker
from tests.parallel.displaced_worker import TIMES
from tests.parallel.wires_worker import cases

RANKS = (2, 3, 4)
#: By default more ranks than cores do what is not done on fewer, and three the wires with least and most to say.
CASES = [
    (nproc, name)
    for nproc in RANKS
    for name in cases(nproc)
    if covering.FULL
    or nproc == 2
    or name not in cases(2)
    or (nproc == 4 and name == "usp int8")
    or (nproc == 3 and name.split()[-1] in ("1bit", "int8"))
]
#: What rounding may move a serial output by, on random weights.
DRIFT = {"int8": 0.03, "fp8": 0.1}


@functools.cache  # one launch per number of ranks
def results(nproc: int) -> dict[str, Any]:
    return launch(wires_worker.run, nproc, nproc, [name for ranks, name in CASES if ranks == nproc])


@pytest.mark.parametrize(("nproc", "name"), CASES)
def test_equals_its_definition(nproc: int, name: str) -> None:
    case, ranks = cases(nproc)[name], results(nproc)[name]
    for rank in ranks:
        assert len(rank["errors"]) == len(TIMES) * case.branches
        if case.twin != "serial":
            assert max(rank["errors"]) <= 1e-10
        warm = rank["drifts"][: case.strategy.warmup_steps * case.branches]
        assert max(warm, default=0.0) <= (1e-10 if case.dtype == torch.float64 and not case.beside else 0.02)
        if isinstance(case.strategy, (Ulysses, Usp, TokenRing)):
            assert 1e-9 < max(rank["drifts"]) <= DRIFT[case.strategy.wire]


@pytest.mark.parametrize(("nproc", "name"), CASES)
def test_bytes_are_those_predicted(nproc: int, name: str) -> None:
    ranks = results(nproc)[name]
    counted = [rank["counted"] for rank in ranks]
    assert all(rank["predicted"] == counted for rank in ranks)


KEPT = [(nproc, name) for nproc, name in CASES if name.split()[0] in ("displaced", "partial", "ring")]


@pytest.mark.parametrize(("nproc", "name"), KEPT)
def test_both_ends_know_the_same_after_every_step(nproc: int, name: str) -> None:
    case, ranks = cases(nproc)[name], results(nproc)[name]
    axis = "ring" if name.startswith("ring") else "patch"
    for rank in ranks:
        peers = [ranks[peer]["bases"] for peer in rank[axis]]
        assert all(peer == rank["bases"] for peer in peers)
        if axis == "patch" or case.strategy.warmup_steps:
            assert all(rank["bases"][2:-1]), "something must be known"
            digests = [tuple(step.values()) for step in rank["bases"][2:-1]]
            assert len(set(digests)) == len(digests), "and it must change"


@pytest.mark.parametrize(("nproc", "name"), CASES)
def test_a_plan_says_what_travels_by_which_wire(nproc: int, name: str) -> None:
    kind, rounded = results(nproc)[name][0]["said"]
    assert kind == "approximate"
    assert any(f"travel by the wire {cases(nproc)[name].strategy.wire}" in line for line in rounded)
