"""Ring and TokenRing with grouped heads, empty shards, masks, half precision; models are in the equivalence matrix."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import token_ring_worker
from tests.parallel.token_ring_worker import CASES, DTYPES, FORMS, STAGES

NPROC = 5
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 3e-2}


@functools.cache
def results() -> list[dict[Any, dict[str, Any]]]:
    return launch(token_ring_worker.run, NPROC, NPROC)


@pytest.mark.parametrize("sizes", [sizes for sizes, _, _ in CASES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_equals_one_kernel_over_all_keys(stage: str, sizes: tuple[int, ...], dtype: str) -> None:
    for rank in results():
        for form in FORMS:
            case = rank[stage, sizes, dtype, form]
            assert case["error"] <= TOLERANCE[dtype]
            assert case["dtype"]
            assert case["counted"] == case["predicted"]


def test_bytes_are_queries_and_results_with_their_log_sum_exp() -> None:
    """Rank 0 of 5, 4, 4, 4, 4 tokens: its own 5 and 4 + 4 + 4 more queries go on, 4 + 4 + 4 + 4 results go home."""
    sizes, rows = (5, 4, 4, 4, 4), 2 * 3  # batch x heads
    for dtype, number, lse in (("float64", 8, 8), ("float32", 4, 4), ("bfloat16", 2, 4)):
        want = rows * ((5 + 4 + 4 + 4) * 5 * number + (4 + 4 + 4 + 4) * (5 * number + lse))
        assert results()[0]["TokenRing, one", sizes, dtype, "keys"]["counted"] == want
        # Doubled, rank 0 sends its own queries three times, and those of the rank before it.
        doubled = want + rows * (5 + 5 - 4 - 4) * 5 * number
        assert results()[0]["TokenRing, doubling", sizes, dtype, "keys"]["counted"] == doubled
