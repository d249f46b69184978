"""PatchPipeline equals the serial pipeline at full warm-up, and its definition after it; or it refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong import PatchPipeline, parse_strategy
from partsong.errors import ArgumentError, RankError
from partsong.parallel import ADAPTERS
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import patch_pipeline_worker as worker

RANKS = (2, 3, 4) if covering.FULL else (2, 3)
#: By default the models take turns with what is asked of them, and three ranks draw with one model each.
USUAL = {
    2: (
        *("exact DiT", "exact PixArt", "exact SD3", "exact Flux", "exact PixArt, many patches"),
        *("stale DiT", "stale Flux", "still SD3", "still Flux", "defined 5 2"),
    ),
    3: ("exact Flux", "stale SD3", "defined 9 1"),
}
CASES = {nproc: [label for label in worker.cases(nproc) if covering.FULL or label in USUAL[nproc]] for nproc in RANKS}


@functools.cache  # one launch per number of ranks, each within a test's time limit
def results(nproc: int) -> dict[str, list[Any]]:
    return launch(worker.run, nproc, nproc, CASES[nproc])


@pytest.fixture(scope="module")
def scenarios() -> dict[str, list[Any]]:
    return launch(worker.scenarios, 2)


def labels(kind: str) -> list[tuple[int, str]]:
    return [(nproc, label) for nproc in RANKS for label in CASES[nproc] if label.startswith(kind)]


@pytest.mark.parametrize(("nproc", "label"), labels("exact"))
def test_equals_the_serial_pipeline_at_full_warm_up(nproc: int, label: str) -> None:
    assert all(row["error"] <= 1e-10 for row in results(nproc)[label])


@pytest.mark.parametrize(("nproc", "label"), labels("exact") + labels("stale"))
def test_counted_bytes_are_the_predicted_ones_step_by_step(nproc: int, label: str) -> None:
    for row in results(nproc)[label]:
        counted, predicted = row["total"]
        assert counted == predicted > 0
        counted, predicted = row["by step"]
        assert counted == predicted


@pytest.mark.parametrize(("nproc", "label"), labels("exact") + labels("stale"))
def test_undo_leaves_no_trace(nproc: int, label: str) -> None:
    for row in results(nproc)[label]:
        assert row["restored"] and row["clean"]
        assert not row["threads"]


@pytest.mark.parametrize(("nproc", "label"), labels("stale"))
def test_drifts_after_the_warm_up(nproc: int, label: str) -> None:
    assert all(row["error"] > 1e-6 for row in results(nproc)[label]), "stale keys must show"


@pytest.mark.parametrize(("nproc", "label"), labels("still"))
def test_is_exact_while_nothing_changes(nproc: int, label: str) -> None:
    assert max(results(nproc)[label]) <= 1e-10


@pytest.mark.parametrize(("nproc", "label"), labels("defined"))
def test_equals_its_definition_after_the_warm_up(nproc: int, label: str) -> None:
    for distance, drift in results(nproc)[label]:
        assert distance <= 1e-10
        assert drift > 1e-6


@pytest.mark.parametrize("name", ["Heun", "noise in every step", "one patch", "uneven stages"])
def test_exact_too_and_without_a_generator(scenarios: dict[str, list[Any]], name: str) -> None:
    for error, same_random_state, threads in scenarios[name]:
        assert error <= 1e-10
        assert same_random_state, "the program goes on drawing what it would after a plain call"
        assert not threads


REFUSED = {
    "thresholding": ("UnsupportedError", "DPMSolverMultistepScheduler: in its step, one position"),
    "callback": ("UnsupportedError", "callback_on_step_end"),
    "few tokens": ("UnsupportedError", "9 image tokens cannot be cut over 10 patches"),
    "wrong stages": ("ArgumentError", "layers=(1, 1) are 2 stages of 2 blocks"),
    "left out blocks": ("UnsupportedError", "3 of 4 blocks were called"),
    "other prompt": ("ArgumentError", "rank 1 was given another encoder_hidden_states"),
    "plain call SD3": ("ArgumentError", "use generate(plan, ...)"),
    "plain call DiT": ("ArgumentError", "use generate(plan, ...)"),
    "bare model": ("UnsupportedError", "give it a pipeline"),
    "composed": ("UnsupportedError", "PatchPipeline has a loop of its own and does not compose with CfgParallel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks_alike(scenarios: dict[str, list[Any]], name: str) -> None:
    kind, text = REFUSED[name]
    first, second = scenarios[name]
    assert first == second
    assert first.startswith(kind)
    assert text in first
    assert first.endswith("threads left: []")


@pytest.mark.parametrize("how", ["dies", pytest.param("raises", marks=pytest.mark.full)])
def test_a_failing_stage_ends_the_run(how: str) -> None:
    with pytest.raises(RankError) as caught:
        launch(worker.fail, 2, how)
    # Whichever is noticed first: the failure itself, or the other stage's wait for it.
    first = {"dies": "exited with code 7", "raises": "in the second stage"}[how]
    told = str(caught.value)
    assert first in told or ("patch pipeline on axis pipe" in told and "threads left: []" in told)


def test_long_skip_connections_are_refused() -> None:
    assert "long skip connections" in str(PatchPipeline().refuses(ADAPTERS["HunyuanDiT2DModel"]))


@pytest.mark.parametrize(
    "knobs",
    [{"warmup_steps": 0}, {"num_patches": 0}, {"num_patches": 999}, {"layers": (2, 0)}, {"degree": 2, "layers": (4,)}],
)
def test_meaningless_knobs_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="PatchPipeline"):
        PatchPipeline(**knobs).validate()


def test_stages_on_the_command_line() -> None:
    assert parse_strategy("patch-pipeline:layers=3+5") == PatchPipeline(layers=(3, 5))
