"""CascadePipeline: the causal rule at depth 1, its definition at others, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partsong import CascadePipeline
from partsong.errors import ArgumentError
from partsong.parallel.ranks.launch import launch
from tests.parallel import cascade_worker


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cascade_worker.ranks(1, str(tmp_path_factory.mktemp("alone")))


@pytest.fixture(scope="module", params=[3, *(pytest.param(nproc, marks=pytest.mark.full) for nproc in (2, 5))])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("several"))
    names = {2: cascade_worker.NAMES, 3: ("two", "four"), 5: ("four", "far")}[request.param]
    return launch(cascade_worker.ranks, request.param, request.param, folder, names)


def test_depth_1_is_the_causal_model_on_clean_blocks() -> None:
    assert cascade_worker.serial() <= 1e-10


@pytest.mark.parametrize(
    "name", ["two", "guided", "four", *(pytest.param(name, marks=pytest.mark.full) for name in ("serial", "far"))]
)
def test_blocks_in_flight_are_their_definition(name: str) -> None:
    assert cascade_worker.definition(name) <= 1e-10


def test_texts_take_over_in_mid_video() -> None:
    assert cascade_worker.definition("serial", told=True) <= 1e-10


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_ranks(alone: dict[str, Any], several: dict[str, Any]) -> None:
    for name, video in several["videos"].items():
        assert torch.equal(alone["videos"][name], video), name


def test_what_is_sent_is_what_was_predicted(several: dict[str, Any]) -> None:
    assert several["counted"]["sent"] == several["counted"]["predicted"]
    assert min(several["counted"]["sent"][0]) > 0


def test_frames_come_block_by_block(alone: dict[str, Any], several: dict[str, Any]) -> None:
    assert alone["counted"]["parts"] == several["counted"]["parts"] == [5, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("frames", "num_frames=25 is 7 latent frames, but the model works in blocks of 2; use 21 or 29"),
        ("depth", "depth=4 of 3 denoising steps; use 1 to 3"),
        ("ranks", "ranks for at most 2 blocks in flight at depth=1 of 4 steps; use at most 2 ranks"),
        ("model", "CascadePipeline needs a model that sees the past alone"),
        ("journal", "only DualParallel and TimestepPipeline keep a journal; leave it out"),
        ("callback", "callback_on_step_end cannot be honoured"),
        ("prompts", "prompts holds the texts after the first one; give that as prompt, one text"),
        ("frame", "prompts has a text from frame 21 on; use frames from 1 to 20"),
        ("hooks", "none"),
    ],
)
def test_refusals(alone: dict[str, Any], several: dict[str, Any], name: str, words: str) -> None:
    if name != "ranks":
        assert words in alone["refusals"][name]
    if name != "ranks" or "serial" not in several["videos"]:  # which two ranks have, who are not too many
        assert words in several["refusals"][name]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [({"depth": 0}, "depth=0; use a positive integer"), ({"window": 0}, "window=0"), ({"sink": -1}, "sink=-1")],
)
def test_refused_knobs(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        CascadePipeline(**knobs).validate()
    assert words in str(caught.value)
