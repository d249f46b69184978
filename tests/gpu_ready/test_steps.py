"""A step in the middle of a generation lets no host wait, and does what the table beside this file says."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests import covering
from tests.gpu_ready import table
from tests.gpu_ready.operators import Operators
from tests.gpu_ready.repeated_calls import RepeatedCalls
from tests.gpu_ready.steps_worker import STRATEGIES

#: What is most likely to wait; the whole table runs with ``--full``.
QUICK = {
    "StableDiffusion3Pipeline": ("Ulysses", "StepCache, late"),
    "QwenImagePipeline": (),
    "WanPipeline": (),
    "MochiPipeline": ("SyncPatch",),
    "StableDiffusionPipeline": (),
}
#: All that waits: a step that decides by what it has measured itself has to know it.
WAITS = {"StepCache": {"tolist partsong/parallel/step_cache/measures.py:FirstBlockChange.errors": 1.0}}

#: Strategies whose blocks a GPU's graph can repeat: all that are exact, and that of a cache is decided outside of them.
EXACT = {name for name, mix in STRATEGIES.items() if all(strategy.kind == "exact" for strategy in mix)}
#: Of two calls that share guidance, the first returns what the second has been given for it.
REPEATED = {name: {(0, 0), (0, 1)} for name in ("CfgParallel", "LayerPipeline")}

KNOWN = table.read()
PAIRS = [(name, label) for name, rows in KNOWN.items() for label in rows if covering.FULL or label in QUICK[name]]


@functools.cache
def measured() -> dict[str, dict[str, list[dict[str, Any]]]]:
    return table.measured(PAIRS)


@pytest.mark.parametrize(("name", "label"), PAIRS)
@pytest.mark.slow
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


def test_exact_strategies_repeat_their_calls() -> None:
    """A call of theirs makes the same operators with the same numbers in each step, and keeps nothing from before."""
    for rows in KNOWN.values():
        for label in set(rows) & EXACT:
            assert all((row["changed"], row["moved"]) in REPEATED.get(label, {(0, 0)}) for row in rows[label]), label


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


class _Counting(torch.nn.Module):
    """Multiplies by the number of the call, or keeps what it returned in one of two places in turn."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.kept = kind, 0, [torch.zeros(4), torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kind == "number":
            return x * float(self.calls)
        place = self.calls % 2 if self.kind == "turns" else 0
        if self.calls <= 2:
            self.kept[place] = x + 1.0
            return x
        return self.kept[place].add_(x)


@pytest.mark.parametrize(
    ("kind", "differences"), [("number", (1, 0)), ("turns", (0, 1)), ("place", (0, 0)), ("none", (None, None))]
)
def test_what_a_graph_could_not_repeat_is_seen(kind: str, differences: tuple[int | None, int | None]) -> None:
    model = _Counting(kind)
    calls = RepeatedCalls([model])
    with calls.recording():
        for _ in range(0 if kind == "none" else 6):
            model(torch.ones(4))
    assert calls.differences(6) == differences
