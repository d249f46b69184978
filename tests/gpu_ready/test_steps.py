"""A step in the middle of a generation lets no host wait, and does what the table beside this file says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests import covering
from tests.gpu_ready import table
from tests.gpu_ready.operators import Operators

#: What is most likely to wait; the whole table runs with ``--full``.
QUICK = {
    "StableDiffusion3Pipeline": ("Ulysses", "StepCache, late"),
    "QwenImagePipeline": ("CfgParallel",),
    "WanPipeline": (),
    "MochiPipeline": ("SyncPatch",),
    "StableDiffusionPipeline": (),
}
#: All that waits: a step that decides by what it has measured itself has to know it.
WAITS = {"StepCache": {"tolist partsong/parallel/step_cache/measures.py:FirstBlockChange.errors": 1.0}}

KNOWN = table.read()
PAIRS = [(name, label) for name, rows in KNOWN.items() for label in rows if covering.FULL or label in QUICK[name]]


@functools.cache
def measured() -> dict[str, dict[str, list[dict[str, Any]]]]:
    return table.measured(PAIRS)


@pytest.mark.parametrize(("name", "label"), PAIRS)
def test_a_step_does_what_the_table_says(name: str, label: str) -> None:
    assert measured()[name][label] == KNOWN[name][label]


def test_nothing_waits_but_a_cache_that_decides_now() -> None:
    for rows in KNOWN.values():
        for label, ranks in rows.items():
            for row in ranks:
                calls = 1 if row["waits"] == {} else next(iter(row["waits"].values()))
                assert row["waits"] == {name: times * calls for name, times in WAITS.get(label, {}).items()}
                assert row["uploads"] == {}
                assert (label in WAITS) == bool(row["waits"])


@pytest.mark.full
def test_the_table_has_every_pair() -> None:
    assert {(name, label) for name, rows in KNOWN.items() for label in rows} == set(table.pairs())


def _looks(x: torch.Tensor) -> None:
    """Asks for numbers in six ways, and makes a tensor of one."""
    bool((x > 0).all()), x.sum().item(), x.tolist(), x[x > 0], x.nonzero(), torch.equal(x, x + 1)
    torch.tensor([1.0], device=x.device)


def test_the_counter_sees_what_makes_a_host_wait() -> None:
    with Operators(tile=0) as operators:
        _looks(torch.arange(4.0))
    names = sorted(name.split()[0] for name, times in operators.waits.items() for _ in range(times))
    assert names == ["_local_scalar_dense", "_local_scalar_dense", "equal", "index", "nonzero", "tolist"]
    assert list(operators.uploads) == ["tensor tests/gpu_ready/test_steps.py:_looks"]
