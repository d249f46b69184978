"""Collectives on 1 to 4 ranks equal what one process computes, and the ledger counts every byte of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import collective_worker

RANKS = (1, 2, 3, 4)


@functools.cache  # one launch per number of ranks, each within a test's time limit
def results(nproc: int) -> dict[str, list[dict[str, Any]]]:
    return launch(collective_worker.run, nproc, nproc)


@pytest.mark.parametrize("nproc", RANKS)
@pytest.mark.parametrize("name", collective_worker.CASES)
def test_equals_one_process(nproc: int, name: str) -> None:
    rows = results(nproc)[name]
    assert len(rows) == nproc
    assert all(row["right"] == 1.0 for row in rows)


@pytest.mark.parametrize("nproc", RANKS)
@pytest.mark.parametrize("name", collective_worker.CASES)
def test_every_byte_is_counted(nproc: int, name: str) -> None:
    for rank, row in enumerate(results(nproc)[name]):
        assert row["counted_sent"] == row["sent"], f"rank {rank}"
        assert row["counted_received"] == row["received"], f"rank {rank}"


def test_something_moves_when_there_are_peers() -> None:
    quiet = [name for name, rows in results(2).items() if not any(row["sent"] for row in rows)]
    assert quiet == ["halo refused"]
    assert not any(row["sent"] for rows in results(1).values() for row in rows)


def test_messages_that_nobody_waits_for_hold_up_no_other() -> None:
    assert launch(collective_worker.dropped, 2, 2) == [[0.0], [1.0]]
