"""DualParallel: exact in one block, its definition in many, the same bits on any number of ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from partsong import DualParallel, Ulysses
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import stream
from partsong.samplers.dual_parallel.loop import _Order
from partsong.samplers.long_video.frame_noise import FrameNoise
from tests import covering
from tests.parallel import dual_worker
from tests.parallel.families import FAMILIES

#: By default ranks make three videos: in uneven blocks, with blocks admitted rarely, and with all that there is.
NAMES = dual_worker.NAMES if covering.FULL else ("uneven", "rarely", "both")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return dual_worker.ranks(1, NAMES)


@pytest.fixture(scope="module", params=[2, *(pytest.param(nproc, marks=pytest.mark.full) for nproc in (3, 4))])
def several(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(dual_worker.ranks, request.param, request.param, NAMES)


def test_blocks_are_their_definition() -> None:
    assert max(dual_worker.definition()) <= 1e-10


def test_one_block_is_the_pipeline(alone: dict[str, Any]) -> None:
    assert alone["one block"] <= 1e-10


def test_the_same_bits_on_any_number_of_ranks(alone: dict[str, Any], several: dict[str, Any]) -> None:
    assert several["one block"] <= 1e-10
    for name, video in several["videos"].items():
        assert torch.equal(alone["videos"][name], video), name


def test_what_is_sent_is_what_was_predicted(several: dict[str, Any]) -> None:
    sent, predicted = several["counted"]
    assert sent == predicted
    assert min(sent) > 0


@pytest.mark.parametrize(("name", "calls"), [("plain", 1), ("guided", 2)])
def test_the_schedule_is_as_short_as_was_told(several: dict[str, Any], name: str, calls: int) -> None:
    ranks = len(several["counted"][0])
    # N^2 - 1 for one call: N - 1 to fill the ranks, N (N - 1) where fewer blocks than ranks are at work.
    assert 6 * 4 * calls < several["slots"][name] <= 6 * 4 * calls + ranks - 1 + calls * ranks * (ranks - 1)


def test_a_step_may_not_call_more_often_than_the_first(several: dict[str, Any]) -> None:
    assert "calls its denoiser more than 1 times in step 1" in several["growing"]


@pytest.mark.parametrize("previous", ["cached", "recomputed"])
@pytest.mark.parametrize("lag", [1, 2])
def test_what_is_kept_is_what_was_told(previous: str, lag: int) -> None:
    knobs = DualParallel(block_frames=3, context=2, previous=previous, admit_every=lag)
    with parallelize(dual_worker.pipeline(), knobs) as plan:
        for _ in stream(plan, **dual_worker.call(65)):
            pass
        keys = plan.denoisers[0].cut.loop.keys
        (line,) = plan.explain().kept
    # Two frames of 6 tokens, keys and values of 24 numbers in 4 layers; two calls in each of 4 steps, and one more.
    once = 2 * 6 * 2 * 24 * 8 * 4
    told = once * (9 if previous == "cached" else 1)
    assert f"previous={previous!r}: keys of neighbours take {told / 1e6:,.1f} MB" in line
    # Frames as they entered the model, far smaller than keys, are not told: 2 of 24 positions in 4 channels.
    inputs = 0 if previous == "cached" else 9 * 2 * 24 * 4 * 8
    assert keys.peak_bytes == told + inputs


def test_frames_come_as_they_are_done_and_equal_the_whole_decoding(
    alone: dict[str, Any], several: dict[str, Any]
) -> None:
    assert alone["decoded"] == several["decoded"] == (0.0, [5, 8, 8, 8])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("frames", "num_frames=28: the autoencoder of WanPipeline makes 1 + 4 n frames; use 25 or 29"),
        ("latents", "with 7 frames; the video has 8 latent frames"),
        ("pipeline", "use generate(plan, ...)"),
        ("callback", "RuntimeError: in the third step"),
        ("hooks", "none"),
    ],
)
def test_refusals_before_any_work(alone: dict[str, Any], several: dict[str, Any], name: str, words: str) -> None:
    assert words in alone["refusals"][name]
    assert words in several["refusals"][name]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"block_frames": 0}, "block_frames=0; use a positive integer"),
        ({"context": -1}, "context=-1; use an integer of 0 or more"),
        ({"block_frames": 4, "context": 5}, "use at most a block"),
        ({"admit_every": 0}, "admit_every=0"),
        ({"previous": "kept"}, "use cached or recomputed"),
        ({"noise": "pink"}, "use pool or independent"),
        ({"degree": 2, "layers": (1, 2, 3)}, "names 3 stages, not degree=2"),
    ],
)
def test_refused_knobs(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        DualParallel(**knobs).validate()
    assert words in str(caught.value)


def test_refused_models() -> None:
    with pytest.raises(UnsupportedError, match="not known to be relative"):
        parallelize(FAMILIES["DiT"].model(4, torch.float32), DualParallel())


def test_a_strategy_that_makes_the_whole_video_does_not_stream() -> None:
    with parallelize(dual_worker.pipeline(), Ulysses()) as plan, pytest.raises(UnsupportedError, match="at once"):
        stream(plan, prompt="a red circle")


@pytest.mark.parametrize(("blocks", "steps", "lag"), [(5, 4, 1), (3, 7, 2), (6, 2, 3), (1, 3, 1)])
def test_every_visit_is_made_once_after_what_it_reads(blocks: int, steps: int, lag: int) -> None:
    order, made = _Order(blocks, steps, lag), []
    while not order.is_over:
        made += [(b, order.round - lag * b) for b in order.members(order.round)]
        order.round += 1
    assert sorted(made) == [(b, t) for b in range(blocks) for t in range(steps)]
    for place, (block, step) in enumerate(made):
        for read in ((block, step - 1), (block - 1, step), (block + 1, step - lag)):
            assert read not in made[place:]


def test_a_window_never_holds_a_frame_of_noise_twice() -> None:
    noise = FrameNoise([3], frames=5, context=3, kind="pool")
    numbers = [noise.numbers(block) for block in range(40)]
    for before, here in pairwise(numbers):
        assert len(set(before[-3:]) | set(here)) == 8
    assert noise.numbers(7) == FrameNoise([3], frames=5, context=3, kind="pool").numbers(7) == numbers[7]
    assert len(set(numbers)) == 40


def test_noise_is_that_of_the_sample_in_any_batch() -> None:
    both = FrameNoise([3, 4], frames=2, context=0, kind="independent").like(torch.empty(2, 4, 2, 3, 3), 2, 1)
    alone = FrameNoise([3], frames=2, context=0, kind="independent")
    alone.drawn = (3, 3)
    assert torch.equal(both[0], alone.like(torch.empty(2, 4, 2, 3, 3), 2, 1)[0])
    assert abs(float(both.std()) - 1.0) < 0.2
