"""Every strategy on every family and 1 to 4 ranks equals one rank; the ledger counts what the plan predicts."""

from __future__ import annotations

import functools

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel.equivalence_worker import DTYPES, SIDES, families, run, sizes, strategies
from tests.parallel.families import FAMILIES

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}


@functools.cache
def results(nproc: int, video: bool):
    """One launch per world size serves all its cases of pictures, one those of videos."""
    return launch(run, nproc, nproc, video)


CASES = [
    (nproc, label, family)
    for nproc in (1, 2, 3, 4)
    for label, chosen in strategies(nproc).items()
    for family in families(chosen, nproc)
]


@pytest.mark.parametrize(("nproc", "label", "family"), CASES)
def test_equals_serial(nproc: int, label: str, family: str) -> None:
    for side, dtype in sizes(label, family, nproc):
        case = results(nproc, FAMILIES[family].video)[label, family, side, dtype]
        assert case["error"] <= TOLERANCE[dtype], (side, dtype)
        assert case["counted"] == case["predicted"], (side, dtype)
        assert case["restored"], f"undo() must give back the same bits: {side}, {dtype}"
        assert case["moved"], f"the inputs of the steps must matter: {side}, {dtype}"


def test_matrix_holds_odd_token_counts() -> None:
    inputs = [FAMILIES[name].call(side, 1, DTYPES["float32"]) for name in FAMILIES for side in SIDES]
    tokens = {call["hidden_states"].shape for call in inputs if "hidden_states" in call}
    assert any(shape[1] % 2 for shape in tokens if len(shape) == 3), "Flux with an odd number of tokens"
    assert {side // 2 for side in SIDES} >= {3, 4}, "patched families with 9 and 16 tokens"
