"""LayerPipeline on denoisers equals the serial pipeline, keeps stages busy with several samples, or refuses."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong import CfgParallel, DataParallel, LayerPipeline, TensorParallel
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import layer_pipeline_worker as worker

RANKS = (2, 3, 4) if covering.FULL else (2,)
#: Pipelines with guidance in a batch and in two calls, and what two ranks alone show.
USUAL = ("PixArt", "Flux", "SD3, skipped layers", "memory", "in flight")
CASES = {nproc: [label for label in worker.cases(nproc) if covering.FULL or label in USUAL] for nproc in RANKS}
COMPOSED = ("Wan x CfgParallel", "PixArt x CfgParallel")
MADE = [(nproc, label) for nproc in RANKS for label in CASES[nproc] if label not in ("memory", "in flight")]
MADE += [(4, label) for label in COMPOSED if covering.FULL]


@functools.cache
def results(nproc: int) -> dict[str, list[Any]]:
    return launch(worker.run, nproc, nproc, CASES[nproc])


@functools.cache
def refusals() -> dict[str, list[str]]:
    return launch(worker.refusals, 2)


@pytest.mark.parametrize(("nproc", "label"), MADE)
def test_equals_the_serial_pipeline(nproc: int, label: str) -> None:
    assert all(row["error"] <= 1e-10 for row in results(nproc)[label])


@pytest.mark.parametrize(("nproc", "label"), MADE)
def test_counted_bytes_are_the_predicted_ones_step_by_step(nproc: int, label: str) -> None:
    for row in results(nproc)[label]:
        counted, predicted = row["total"]
        assert counted == predicted > 0
        counted, predicted = row["by step"]
        assert counted == predicted


@pytest.mark.parametrize(("nproc", "label"), MADE)
def test_ranks_hold_a_share_of_the_weights_until_undo(nproc: int, label: str) -> None:
    rows = results(nproc)[label]
    assert all(row["share"] < 1 for row in rows)
    assert all(row["restored"] and row["after"] == 0 for row in rows)


@pytest.mark.parametrize(("label", "samples"), [("PixArt", 4), ("Flux", 6)])
def test_explanation_says_how_many_samples_are_in_flight(label: str, samples: int) -> None:
    """PixArt's guidance is in a batch, Flux's in two calls of three pictures each."""
    row = results(2)[label][0]
    line = f"2 + 2 blocks with their weights, {samples} samples in flight over 2 ranks (pipe)"
    assert line.replace("2 + 2", "3 + 3" if label == "Flux" else "2 + 2") in row["explained"]


def test_weights_are_predicted() -> None:
    for held, predicted in results(2)["memory"]:
        assert held == predicted


def test_first_stage_begins_a_sample_before_the_second_has_finished_the_last_one() -> None:
    assert max(results(2)["in flight"]) <= 1e-10


REFUSED = {
    "UNet": "LayerPipeline on UNet2DConditionModel: it works on rows of an image, not on tokens",
    "long skips": "long skip connections lead from its first blocks to its last",
    "few blocks": "1 blocks of DiTTransformer2DModel cannot be 2 stages; use at most 1",
    "wrong layers": "layers=(2, 3) are 2 stages of 5 blocks",
    "StepCache": "LayerPipeline does not compose with StepCache",
    "Ulysses": "LayerPipeline does not compose with Ulysses",
    "cache of diffusers": "counts on steps that come one after the other, whole, which LayerPipeline changes",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks_alike(name: str) -> None:
    first, second = refusals()[name]
    assert first == second
    assert REFUSED[name] in first
    assert "\n" not in first


def test_beside_branches_and_samples_only() -> None:
    assert LayerPipeline().composes(CfgParallel()) and LayerPipeline().composes(DataParallel())
    assert not LayerPipeline().composes(TensorParallel())
