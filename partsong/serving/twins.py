"""Compares the files of a job with those of its serial twin, and draws where they differ."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from partsong.outputs import max_abs_diff, psnr
from partsong.serving.jobs import Job

__all__ = ["compare_files", "difference_map", "note_difference"]

#: Stands for the ratio of equal pictures, whose logarithm is infinite.
_EQUAL = 999.0


async def note_difference(job: Job, other: Job, file: Callable[[str], Path]) -> None:
    """Notes on a job and its serial twin how far they are apart, or why that is not known.

    Args:
        job: one of the two; it has just been made.
        other: the other one.
        file: returns the path of a file by name.
    """
    try:
        pairs = [(file(a), file(b)) for a, b in zip(job.files, other.files, strict=True)]
        apart = await asyncio.to_thread(compare_files, pairs)
    except Exception as error:  # noqa: BLE001 - such as a file that has gone since; the job itself is done
        job.note = f"it could not be compared with its serial twin: {error}"
        return
    for each in (job, other):
        each.max_abs_diff, each.psnr_to_serial = apart


def compare_files(pairs: Sequence[tuple[Path, Path]]) -> tuple[float, float]:
    """Returns the largest difference in [0, 1] and the lowest PSNR in dB of pictures, or of the frames of videos.

    The files hold 8 bits per value, so a difference below 1/255 may not show. Videos are compressed: equal frames
    stay equal, but other differences may grow or shrink.
    """
    largest, ratio = 0.0, math.inf
    for one, other in (both for pair in pairs for both in _frames_of(*pair)):
        largest, ratio = max(largest, max_abs_diff(one, other)), min(ratio, psnr(one, other))
    return largest, _EQUAL if math.isinf(ratio) else ratio


def difference_map(one: Path, other: Path) -> tuple[bytes, float]:
    """Returns a PNG file that is black where two pictures are equal and white where they differ most.

    Of two videos it shows for each place the largest difference in any frame.

    Returns:
        The file, and the largest difference in [0, 1].
    """
    apart = functools.reduce(np.maximum, (np.abs(a - b).max(axis=-1) for a, b in _frames_of(one, other)))
    largest = float(apart.max())
    shown = apart / largest if largest else apart
    buffer = io.BytesIO()
    Image.fromarray(np.round(255 * shown).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue(), largest


_Pixels = NDArray[np.float64]


def _frames_of(one: Path, other: Path) -> Iterator[tuple[_Pixels, _Pixels]]:
    """Yields the frames of two files side by side; a picture has one."""
    return zip(_frames(one), _frames(other), strict=True)


def _frames(path: Path) -> Iterator[_Pixels]:
    if path.suffix != ".mp4":
        with Image.open(path) as picture:
            yield np.asarray(picture.convert("RGB"), dtype=np.float64) / 255
        return
    import imageio.v2 as imageio

    with contextlib.closing(imageio.get_reader(path)) as reader:
        for frame in reader.iter_data():
            yield np.asarray(frame, dtype=np.float64) / 255
