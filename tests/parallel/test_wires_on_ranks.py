"""Wires between real ranks: outputs are what the definition says, both ends know the same, and bytes are predicted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong import TokenRing, Ulysses, Usp
from partsong.parallel.exchange.wires import WIRES, FourBits
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import wires_worker
from tests.parallel.displaced_worker import TIMES
from tests.parallel.wires_worker import HEIGHT, ROWS, cases, images

RANKS = (2, 3, 4) if covering.FULL else (2, 4)
#: By default the wires take turns with the strategies. More ranks do what is not done on fewer.
USUAL = {
    2: {
        *("displaced int8", "displaced 1bit", "displaced lowrank", "displaced half", "displaced held"),
        *("ring fp8", "ring 4bit", "ring masks", "partial 1bit", "ulysses int8", "token ring int8"),
        *("displaced beside a cache", "ring beside a cache", "ring lowrank"),
    },
    4: {"displaced beside ulysses", "ring beside ulysses", "usp fp8", "displaced 2bit"},
}
CASES = [(nproc, name) for nproc in RANKS for name in cases(nproc) if covering.FULL or name in USUAL[nproc]]
#: What rounding may move a serial output by, on random weights.
DRIFT = {"int8": 0.03, "fp8": 0.1}


@functools.cache  # one launch per number of ranks
def results(nproc: int) -> dict[str, Any]:
    return launch(wires_worker.run, nproc, nproc, [name for ranks, name in CASES if ranks == nproc], covering.FULL)


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


def arrived(values: Tensor, base: Tensor, name: str) -> Tensor:
    """What arrives of a border row, in chunks of 64 numbers with a scale each: its values, or residuals of 4 bits."""
    if name == "none":
        return values
    off = values if name == "int8" else values - base
    flat = torch.nn.functional.pad(off.flatten(), (0, -off.numel() % 64)).view(-1, 1, 64)
    wire = WIRES["int8"] if name == "int8" else FourBits()
    got = wire.decode(wire.encode(flat), tuple(flat.shape)).flatten()[: off.numel()].view_as(off).double()
    return got if name == "int8" else base + got


@pytest.mark.parametrize("nproc", RANKS)
@pytest.mark.parametrize(("name", "order"), ROWS)
def test_border_rows_are_those_of_the_step_before_by_the_wire(nproc: int, name: str, order: int) -> None:
    starts = [0, *torch.tensor([len(part) for part in torch.arange(HEIGHT).tensor_split(nproc)]).cumsum(0).tolist()]
    for rank, steps in enumerate(results(nproc)["rows"][name, order]):
        for side, row in ((0, starts[rank] - 1), (1, starts[rank + 1])):
            if not 0 <= row < HEIGHT:
                assert all(step[side] is None for step in steps)
                continue
            fresh = [image[:, :, row : row + 1] for image in images()]
            known = fresh[:2]
            for step in range(2, len(TIMES)):
                last, older = known[-1], known[-2]
                times = TIMES[step - 2 : step + 1]
                ratio = min((times[2] - times[1]) / (times[1] - times[0]), 2.0) * order
                torch.testing.assert_close(steps[step][side], last + ratio * (last - older), rtol=0.0, atol=1e-12)
                known.append(arrived(fresh[step], last, name))


@pytest.mark.parametrize("nproc", RANKS)
def test_unets_send_borders_by_wires_too(nproc: int) -> None:
    for ranks in results(nproc)["unets"].values():
        assert all(rank["counted"] == rank["predicted"] for rank in ranks)
        assert all(rank["bases"] == ranks[0]["bases"] for rank in ranks)
        assert ranks[0]["bases"]


KEPT = [(nproc, name) for nproc, name in CASES if name.split()[0] in ("displaced", "partial", "ring")]


@pytest.mark.parametrize(("nproc", "name"), KEPT)
def test_both_ends_know_the_same_after_every_step(nproc: int, name: str) -> None:
    case, ranks = cases(nproc)[name], results(nproc)[name]
    axis = "ring" if name.startswith("ring") else "patch"
    for rank in ranks:
        peers = [ranks[peer]["bases"] for peer in rank[axis]]
        assert all(peer == rank["bases"] for peer in peers)
        if "cache" not in name and (axis == "patch" or case.strategy.warmup_steps):
            assert all(rank["bases"][2:-1]), "something must be known"
            digests = [tuple(step.values()) for step in rank["bases"][2:-1]]
            assert len(set(digests)) == len(digests), "and it must change"


@pytest.mark.parametrize(("nproc", "name"), CASES)
def test_a_plan_says_what_travels_by_which_wire(nproc: int, name: str) -> None:
    kind, rounded = results(nproc)[name][0]["said"]
    assert kind == "approximate"
    assert any(f"travel by the wire {cases(nproc)[name].strategy.wire}" in line for line in rounded)
