"""Shows a stream's progress in frames, and records in the ledger how soon and how fast they came."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from partsong import ledger
from partsong.progress import progress

__all__ = ["with_progress"]


def with_progress(parts: Generator[Any, None, None], pipe: Any, total: int | None, dim: int) -> Iterator[Any]:
    """Passes on the parts of a sampler, and counts their frames.

    The bar is the pipeline's: hidden where its own is. At the end the active ledger gets a record with ``phase``
    "stream", ``frames``, ``first_frame_seconds``, and ``frames_per_second`` from the first part to the last, including
    the consumer's time between parts.

    Args:
        parts: outputs of a video pipeline, or None on ranks that decode nothing; a generator.
        pipe: the pipeline.
        total: frames of the whole video, where they are known.
        dim: of the frames in an output that is an array or tensor.
    """
    hidden = getattr(pipe, "_progress_bar_config", {}).get("disable", False)
    start, first, last, frames, later = time.perf_counter(), 0.0, 0.0, 0, 0
    with progress(total or 0, "frames", False if hidden else None, unit="frame") as bar, closing(parts):
        try:
            for part in parts:
                if part is not None:
                    count, last = _frames(part, dim), time.perf_counter() - start
                    later, frames, first = (
                        later + (count if frames else 0),
                        frames + count,
                        first or (last if count else 0.0),
                    )
                    bar.update(count)
                yield part
        finally:
            active = ledger.active()
            if active is not None and frames:
                pace = later / (last - first) if later else None
                active.step(phase="stream", frames=frames, first_frame_seconds=first, frames_per_second=pace)


def _frames(part: Any, dim: int) -> int:
    video = part[0] if isinstance(part, tuple) else part.frames
    return len(video[0]) if isinstance(video, list) else video.shape[dim]
