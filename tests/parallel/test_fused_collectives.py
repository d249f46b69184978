"""What moves all parts of a tensor in one operation, as on NCCL, gives the serial result and the predicted bytes."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel.equivalence_worker import Case, families, run_fused, strategies

#: Heads and tokens that divide and that do not, key heads in groups, and texts beside the picture.
FAMILIES = ("DiT", "SD3", "Flux", "Lumina2")
CASES = [
    (nproc, label, name, "float64", side)
    for nproc in (2, 3)
    for label, chosen in strategies(nproc).items()
    for name, side in zip(FAMILIES, (6, 8, 6, 8), strict=True)
    if name in families(chosen)
    # By default three ranks do what two do not.
    if covering.FULL or nproc == 2 or ("waves" in label and name == "Flux")
]


@functools.cache
def results(nproc: int) -> dict[Case, dict[str, Any]]:
    return launch(run_fused, nproc, nproc, [case for case in CASES if case[0] == nproc])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_serial(case: Case) -> None:
    result = results(case[0])[case]
    assert result["error"] <= 1e-10
    assert result["counted"] == result["predicted"]
