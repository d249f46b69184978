"""Compares the files of a job with those of its serial twin, and draws where they differ."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from partsong.outputs import max_abs_diff, psnr

__all__ = ["compare_files", "difference_map"]

#: Written for the ratio of equal pictures, whose logarithm has no end.
_EQUAL = 999.0


def compare_files(pairs: Sequence[tuple[Path, Path]]) -> tuple[float | None, float | None]:
    """Returns the largest difference of pictures in [0, 1] and the least ratio in dB; None for videos.

    The files hold 8 bits per value, so a difference below 1/255 may show as none.
    """
    if any(path.suffix != ".png" for pair in pairs for path in pair):
        return None, None
    read = [(_pixels(one), _pixels(other)) for one, other in pairs]
    ratio = min(psnr(one, other) for one, other in read)
    return max(max_abs_diff(one, other) for one, other in read), _EQUAL if math.isinf(ratio) else ratio


def difference_map(one: Path, other: Path) -> tuple[bytes, float]:
    """Returns a PNG file that is black where two pictures are equal and white where they differ most.

    Returns:
        The file, and the largest difference in [0, 1].
    """
    apart = np.abs(_pixels(one) - _pixels(other)).max(axis=-1)
    largest = float(apart.max())
    shown = apart / largest if largest else apart
    buffer = io.BytesIO()
    Image.fromarray(np.round(255 * shown).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue(), largest


def _pixels(path: Path) -> NDArray[np.float64]:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"), dtype=np.float64) / 255
