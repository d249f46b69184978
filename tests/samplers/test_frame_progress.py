"""A with_progress stream: the parts as they are, a bar where the pipeline has one, a line in the ledger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from partsong import DualParallel
from partsong.ledger import Ledger
from partsong.parallel import parallelize
from partsong.samplers import stream
from partsong.samplers.long_video.frame_progress import with_progress
from tests.parallel.dual_worker import call, pipeline


def _closed(events: list[str]) -> Any:
    try:
        for frames in (5, 8, 8):
            yield SimpleNamespace(frames=np.zeros((1, frames, 2, 2, 3)))
    finally:
        events.append("closed")


def test_parts_pass_and_the_ledger_tells_when_they_came() -> None:
    with parallelize(pipeline(), DualParallel(block_frames=2, context=1)) as plan, Ledger(flops=False) as ledger:
        parts = list(stream(plan, **call(29, output_type="pt")))
    (record,) = [record for record in ledger.records if record.get("phase") == "stream"]
    assert record["frames"] == sum(part.frames.shape[1] for part in parts) == 29
    assert record["first_frame_seconds"] > 0
    assert record["frames_per_second"] > 0


def test_a_stream_that_is_left_early_ends_what_it_reads() -> None:
    events: list[str] = []
    with Ledger() as ledger:
        parts = with_progress(_closed(events), SimpleNamespace(), 21, 1)
        assert next(parts).frames.shape[1] == 5
        parts.close()
    assert events == ["closed"]
    assert ledger.records[-1]["frames"] == 5
    assert ledger.records[-1]["frames_per_second"] is None


def test_the_bar_counts_frames_and_is_hidden_where_the_pipelines_is() -> None:
    shown: list[Any] = []

    class Bar:
        disable = False

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, frames: int) -> None:
            shown.append(frames)

    def progress(total: int, desc: str, enabled: bool | None, *, unit: str) -> Bar:
        shown.append((total, desc, enabled, unit))
        return Bar()

    latents = (torch.zeros(1, 4, 3, 2, 2),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partsong.samplers.long_video.frame_progress.progress", progress)
        list(with_progress(_closed([]), SimpleNamespace(_progress_bar_config={"disable": True}), 21, 1))
        list(with_progress((part for part in (None, latents)), SimpleNamespace(), None, 2))
    assert shown == [(21, "frames", False, "frame"), 5, 8, 8, (0, "frames", None, "frame"), 3]
