"""TokenRing with grouped heads, empty shards, masks and half precision; models are in the equivalence matrix."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import token_ring_worker
from tests.parallel.token_ring_worker import CASES, DTYPES

NPROC = 4
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 3e-2}


@functools.cache
def results() -> list[dict[Any, dict[str, Any]]]:
    return launch(token_ring_worker.run, NPROC, NPROC)


@pytest.mark.parametrize("sizes", [sizes for sizes, _, _ in CASES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_one_kernel_over_all_keys(sizes: tuple[int, ...], dtype: str) -> None:
    for rank in results():
        assert rank[sizes, dtype]["error"] <= TOLERANCE[dtype]
        assert rank[sizes, dtype]["dtype"]
        assert rank[sizes, dtype]["counted"] == rank[sizes, dtype]["predicted"]


def test_bytes_are_queries_and_results_with_their_log_sum_exp() -> None:
    """Rank 0 of 5, 4, 4, 4 tokens: its own 5 and 4 + 4 more queries go on, 4 + 4 + 4 results go home."""
    sizes, rows = (5, 4, 4, 4), 2 * 3  # batch x heads
    for dtype, number, lse in (("float64", 8, 8), ("float32", 4, 4), ("bfloat16", 2, 4)):
        want = rows * ((5 + 4 + 4) * 5 * number + (4 + 4 + 4) * (5 * number + lse))
        assert results()[0][sizes, dtype]["counted"] == want
