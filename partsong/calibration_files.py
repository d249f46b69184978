"""Says where measurements of machines are kept, and whether any exist, without loading torch."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["any_calibration", "cache_folder", "calibration_folder", "not_measured"]

#: Name of a machine's file: its hardware, and the number of ranks that were measured.
FILE_NAME = "{hardware}-*-ranks.json"


def calibration_folder() -> Path:
    """Returns where calibrations are kept: ``PARTSONG_CALIBRATIONS``, or a folder of the user's cache."""
    if (folder := os.environ.get("PARTSONG_CALIBRATIONS")) is not None:
        return Path(folder)
    return cache_folder() / "calibrations"


def cache_folder() -> Path:
    """Returns the folder of the user's cache that is ours."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "partsong"


def any_calibration() -> bool:
    """Says whether any machine was measured."""
    return any(calibration_folder().glob(FILE_NAME.format(hardware="*")))


def not_measured(ranks: int) -> str:
    """Says that this machine was not measured, and how to do that for a number of ranks."""
    return f"this machine was not measured; run `partsong calibrate --nproc {ranks}` once"
