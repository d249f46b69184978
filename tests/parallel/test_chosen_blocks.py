"""Models whose layers choose blocks of keys, over ranks: the latents of one process, and heads dealt out by work."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partsong.parallel.exchange.head_dealer import deal
from partsong.parallel.ranks.launch import launch
from tests.parallel import chosen_blocks_worker as worker

ON = {2: ["Ulysses", "Ring"], 3: ["Ulysses in one wave", "Ring", "Ring, doubling"], 4: ["Usp"]}


@functools.cache
def launched(nproc: int) -> dict[str, Any]:
    return launch(worker.generated, nproc, nproc, ON[nproc])


@pytest.mark.parametrize(
    ("nproc", "name"),
    [
        pytest.param(nproc, name, marks=[] if nproc == 2 else pytest.mark.full)
        for nproc, names in ON.items()
        for name in names
    ],
)
def test_latents_are_those_of_one_process(nproc: int, name: str) -> None:
    found = launched(nproc)
    assert all(0.3 < share < 0.9 for share in found["shares"]) and found["apart"] > 1e-2
    for row in found[name]:
        assert row["error"] < 1e-4
        assert row["sent"] == row["predicted"] > 0


def test_heads_are_dealt_out_alike_on_all_ranks() -> None:
    first, second = (row["dealt"] for row in launched(2)["Ulysses"])
    assert first == second and any(order != [0, 1, 2] for order in first)
    assert all(sorted(order) == [0, 1, 2] for order in first)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 4))
def test_dealing_by_work(work: list[int], ranks: int) -> None:
    rooms = [len(work) // ranks + (rank < len(work) % ranks) for rank in range(ranks)]
    order = deal(work, rooms)
    assert sorted(order) == list(range(len(work)))
    ends = [sum(rooms[: rank + 1]) for rank in range(ranks)]
    loads = [sum(work[head] for head in order[end - room : end]) for end, room in zip(ends, rooms, strict=True)]
    # No rank has more than the least one by over the heaviest head, where both have as many heads.
    same = [load for load, room in zip(loads, rooms, strict=True) if room == rooms[0]]
    assert max(same) - min(same) <= max(work)


def test_refusals() -> None:
    found = launch(worker.refusals, 2)
    for name in worker.REFUSED:
        assert all(
            "sparse_params was given; its blocks of keys are chosen over all tokens" in said for said in found[name]
        )
    assert all("1 blocks of tokens cannot be cut over 2 ranks" in said for said in found["one block"])
