"""PatchPipeline on every model: exact while nothing changes and at full warm-up, or refused; on pipelines as well."""

from __future__ import annotations

from typing import Any

import pytest

from partsong import PatchPipeline
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import patch_models_worker as worker
from tests.parallel.families import FAMILIES, adapter_of
from tests.pipelines.cases import CASES

#: By default every other family.
NAMES = [*FAMILIES][:: 1 if covering.FULL else 2]


@pytest.fixture(scope="module")
def families() -> list[dict[str, float | str]]:
    return launch(worker.each_family, 2, NAMES)


@pytest.fixture(scope="module")
def pipelines() -> dict[str, list[Any]]:
    return launch(worker.pipelines, 2, PIPELINES)


#: By default one pipeline for each way to be unusual.
USUAL = (
    *("AceStepPipeline", "AuraFlowPipeline", "ErnieImagePipeline", "FluxKontextPipeline", "HiDreamImagePipeline"),
    *("Lumina2Pipeline", "MochiPipeline", "ZImagePipeline"),
)
PIPELINES = worker.PIPELINES if covering.FULL else USUAL


@pytest.mark.parametrize("name", NAMES)
def test_is_exact_while_nothing_changes_or_is_refused(families: list[dict[str, float | str]], name: str) -> None:
    refused = PatchPipeline().refuses(adapter_of(name))
    for told in families:
        if refused is None:
            assert isinstance(told[name], float)
            assert told[name] <= 1e-10
        else:
            assert refused in str(told[name])


def test_pictures_in_different_places_of_their_sequences_are_refused(families: list[dict[str, float | str]]) -> None:
    assert all("sample one prompt at a time" in str(told["texts of several lengths"]) for told in families)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_is_exact_at_full_warm_up_and_drifts_after_it(pipelines: dict[str, list[Any]], name: str) -> None:
    for exact, drift, sent, predicted in pipelines[name]:
        assert exact <= CASES[name].tolerance
        assert 1e-9 < drift < 0.5
        assert sent == predicted > 0
