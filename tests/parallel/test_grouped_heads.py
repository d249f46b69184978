"""Query heads that share keys: each reads those of its own group, wherever a rank's heads begin and end."""

from __future__ import annotations

import functools

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import grouped_heads_worker as worker


@functools.cache
def launched(nproc: int) -> list[dict[tuple[int, int], float]]:
    return launch(worker.apart, nproc, nproc)


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("heads", [case[1:] for case in worker.CASES], ids=str)
def test_each_head_reads_its_own_group(nproc: int, heads: tuple[int, int]) -> None:
    apart = [rank[heads] for rank in launched(nproc)]
    assert len(apart) == nproc
    assert max(apart) < 1e-12
