"""Every strategy on every family and 1 to 4 ranks equals one rank; the ledger counts what the plan predicts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.covering import chosen
from tests.parallel.equivalence_worker import DTYPES, SIDES, Case, product, run, usual
from tests.parallel.families import FAMILIES

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
#: Families that compute norms in single precision, whatever the type of their weights. Sums over ranks come in another
#: order than in one matrix product, and such a norm rounds what that changes.
SINGLE = ("AnyFlow", "Bria FIBO 2", "Nucleus-Image", "QwenImage", "Sana", "Z-Image")
ROUNDED = 1e-7
PRODUCT = [case for nproc in (1, 2, 3, 4) for case in (product if covering.FULL else usual)(nproc)]
#: float64 shows smaller faults, and the more ranks there are, the more a case costs. What meets on several ranks need
#: not meet on one, where strategies have nothing to do.
SEVERAL = chosen([case for case in PRODUCT if case[0] > 1], prefer=lambda case: (case[3] != "float64", case[0]))
CASES = [*SEVERAL, *chosen((product if covering.FULL else usual)(1), beside=SEVERAL)]


@functools.cache
def results(nproc: int, video: bool) -> dict[Case, dict[str, Any]]:
    """One launch per number of ranks serves all its cases of pictures, one those of videos."""
    return launch(run, nproc, nproc, [case for case in CASES if case[0] == nproc and FAMILIES[case[2]].video == video])


def rounds(case: Case) -> bool:
    """Whether sums over ranks go through norms in single precision."""
    return "TensorParallel" in case[1] and case[2] in SINGLE


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.slow
def test_equals_serial(case: Case) -> None:
    result = results(case[0], FAMILIES[case[2]].video)[case]
    assert result["error"] <= max(TOLERANCE[case[3]], ROUNDED if rounds(case) else 0.0)
    assert result["counted"] == result["predicted"]
    assert result["restored"], "undo() must give back the same bits"
    assert result["moved"], "the inputs of the steps must matter"


def test_matrix_holds_odd_token_counts() -> None:
    inputs = [FAMILIES[name].call(side, 1, DTYPES["float32"]) for name in FAMILIES for side in SIDES]
    tokens = {call["hidden_states"].shape for call in inputs if "hidden_states" in call}
    assert any(shape[1] % 2 for shape in tokens if len(shape) == 3), "Flux with an odd number of tokens"
    assert {side // 2 for side in SIDES} >= {3, 4}, "patched families with 9 and 16 tokens"
