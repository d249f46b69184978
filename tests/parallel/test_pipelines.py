"""Unmodified diffusers pipelines under every strategy give the serial picture on every rank, or refuse."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.covering import chosen
from tests.parallel import pipeline_worker
from tests.parallel.pipeline_worker import DTYPES, Key
from tests.parallel.pipelines import PIPES, STEPS

RANKS = (2, 3, 4)
TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
USUAL = {
    3: (),
    4: (("CfgParallel x Ulysses", "DiT"), ("CfgParallel x DisplacedPatch", "Flux"), ("Usp", "SD3")),
}
PRODUCT: list[Key] = [
    (nproc, label, name, dtype)
    for nproc in RANKS
    for label in pipeline_worker.strategies(nproc)
    for name in PIPES
    for dtype in DTYPES
    # By default more ranks draw what is uneven there or fewer cannot, in the type that shows smaller faults.
    if covering.FULL or nproc == 2 or (dtype == "float64" and (label, name) in USUAL[nproc])
]
KEYS = chosen(PRODUCT, prefer=lambda key: (key[3] != "float64", key[0]))


@functools.cache  # one launch per number of ranks, each within a test's time limit
def matrix(nproc: int) -> dict[Key, dict[str, Any]]:
    return launch(pipeline_worker.matrix, nproc, nproc, [key for key in KEYS if key[0] == nproc])


@pytest.fixture(scope="module")
def scenarios() -> dict[str, list[Any]]:
    return launch(pipeline_worker.scenarios, 2)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_every_rank_returns_the_serial_picture(key: Key) -> None:
    rows = matrix(key[0])[key]["rows"]
    assert len(rows) == key[0]
    assert max(row["error"] for row in rows) <= TOLERANCE[key[3]]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_counted_bytes_are_the_predicted_ones_step_by_step(key: Key) -> None:
    rows = matrix(key[0])[key]["rows"]
    assert [row["sent"] for row in rows] == matrix(key[0])[key]["predicted"]
    assert sum(row["sent"] for row in rows) > 0
    assert [row["records"] for row in rows] == [STEPS] * key[0]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_undo_leaves_no_trace(key: Key) -> None:
    for row in matrix(key[0])[key]["rows"]:
        assert row["restored"], "the pipeline's output changed"
        assert row["left"], "the scheduler or the pipeline carries something new"
        assert row["clean"], "a module still carries a hook"


REFUSED = {
    "other prompt": ("ArgumentError", "rank 1 was given another encoder_hidden_states"),
    "other length": ("ArgumentError", "another encoder_hidden_states"),
    "other size": ("ArgumentError", "rank 1 makes latents of shape"),
    "larger size": ("ArgumentError", "rank 1 makes latents of shape"),
    "other guidance": ("ArgumentError", "another hidden_states"),
    "changed in the last step": ("UnsupportedError", "call 2 of the model had another encoder_hidden_states"),
    "diverging callback": ("ArgumentError", "in step 3 rank 1 had another hidden_states than rank 0"),
    "two plans": ("UnsupportedError", "is under another plan already"),
    "unknown model": ("UnsupportedError", "Linear is not a supported architecture"),
    "ControlNet": ("UnsupportedError", "another input has 11"),
    "refused argument": ("UnsupportedError", "kv_cache_mode was given; the cache of reference tokens"),
    "einsum processor": ("UnsupportedError", "Einsum"),
    "causal processor": ("UnsupportedError", "causal"),
    "few tokens": ("UnsupportedError", "1 image tokens cannot be cut over 2 ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks_alike(scenarios: dict[str, list[Any]], name: str) -> None:
    kind, text = REFUSED[name]
    first, second = scenarios[name]
    assert first == second
    assert first.startswith(kind)
    assert text in first


def test_a_refused_second_plan_leaves_the_first_one_working(scenarios: dict[str, list[Any]]) -> None:
    for error, moved, clean in scenarios["two plans, first survives"]:
        assert error <= 1e-10
        assert moved
        assert clean


@pytest.mark.parametrize("name", ["changed prompt Flux cfg", "changed prompt Wan cfg"])
def test_a_prompt_changed_in_mid_generation_is_honoured(scenarios: dict[str, list[Any]], name: str) -> None:
    for error, effect in scenarios[name]:
        assert effect > 1e-3, "the change must change the picture"
        assert error <= 1e-10


@pytest.mark.parametrize("name", ["Heun cfg", "Heun displaced"])
def test_a_second_order_sampler(scenarios: dict[str, list[Any]], name: str) -> None:
    for error, calls in scenarios[name]:
        assert error <= 1e-10
        assert calls == 2 * STEPS - 1
