"""Texts that take over in mid-video: blocks before stay as they were, and those after follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from partsong import DataParallel, DualParallel, TimestepPipeline
from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.parallel import Strategy, parallelize
from partsong.samplers import generate
from tests.parallel import dual_worker, timestep_worker
from tests.parallel.cascade_worker import telling


def video(pipe: Any, strategy: Strategy, **more: Any) -> torch.Tensor:
    with parallelize(pipe, strategy) as plan:
        frames: torch.Tensor = generate(plan, **telling(pipe), **more).frames
        return frames


@pytest.mark.parametrize(
    ("worker", "strategy", "same"),
    [
        (timestep_worker, TimestepPipeline(window=2), 6),
        # Block 3 is the first that follows; blocks before it see a little of it.
        (dual_worker, DualParallel(block_frames=2, context=1, admit_every=4), 6),
    ],
)
def test_the_block_with_the_frame_is_the_first_to_follow(worker: Any, strategy: Strategy, same: int) -> None:
    plain, told, changed = (
        video(worker.pipeline(), strategy, prompts=prompts) for prompts in (None, {21: "a"}, {21: "b"})
    )
    assert torch.equal(plain, told)
    assert torch.equal(plain[:, :, :same], changed[:, :, :same])
    assert not torch.isclose(plain[:, :, same:], changed[:, :, same:]).any(dim=-1).any()


@pytest.mark.parametrize(
    ("prompts", "error", "words"),
    [
        ({"21": "b"}, ArgumentTypeError, "prompts holds texts by frame"),
        ({21: ["b"]}, ArgumentTypeError, "prompts holds texts by frame"),
        ({0: "b"}, ArgumentError, "a text from frame 0 on; use frames from 1 to 44"),
    ],
)
def test_refused_texts(prompts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        video(timestep_worker.pipeline(), TimestepPipeline(), prompts=prompts)


def test_a_journal_knows_the_texts(tmp_path: Path) -> None:
    first, again = (
        video(timestep_worker.pipeline(), TimestepPipeline(), prompts={21: "b"}, journal=tmp_path) for _ in range(2)
    )
    assert torch.equal(first, again)
    with pytest.raises(ArgumentError, match="the journal of another video"):
        video(timestep_worker.pipeline(), TimestepPipeline(), prompts={21: "c"}, journal=tmp_path)


def test_a_video_in_one_piece_has_one_text() -> None:
    with pytest.raises(UnsupportedError, match="prompts changes the text between the blocks of DualParallel"):
        video(dual_worker.pipeline(), DataParallel(), prompts={21: "b"})
