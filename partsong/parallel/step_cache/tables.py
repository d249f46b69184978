"""Holds the calibrated numbers of a model, and reads them from the folder of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError

__all__ = ["FILE_NAME", "CacheCalibration", "calibration_path", "read_calibrations", "write_calibrations"]

#: Name of the file, in the folder of a pipeline or of its model.
FILE_NAME = "step_cache.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCalibration:
    """Holds a model's measurements for generations with one number of steps.

    Attributes:
        polynomial: coefficients, highest power first. It turns the relative change of the first block's modulated input
            into the relative change of the output, both from one step to the next.
        ratios: for each step, the size of what all blocks add over that in the previous step; the first is 1.

    Source: the polynomial is TeaCache's, arXiv 2411.19108; the ratios are MagCache's, arXiv 2506.09045.
    """

    polynomial: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()

    def validate(self) -> None:
        """Refuses values that are not numbers.

        Raises:
            ArgumentError: names the field.
        """
        for name in ("polynomial", "ratios"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, int | float) for value in values):
                raise ArgumentError(f"CacheCalibration: {name}={values!r}; use a tuple of numbers")


def calibration_path(module: Any) -> Path | None:
    """Finds the file in the folder that a model was loaded from, or the one above it; None where there is none."""
    name = module.config.get("_name_or_path") if hasattr(module, "config") else None
    folders = (Path(name), Path(name).parent) if name and Path(name).is_dir() else ()
    return next((path for folder in folders if (path := folder / FILE_NAME).is_file()), None)


def read_calibrations(path: Path) -> dict[int, CacheCalibration]:
    """Reads a file: a calibration for each number of steps.

    Raises:
        ArgumentError: the file is not there, or does not hold what `write_calibrations` writes.
    """
    try:
        steps = json.loads(Path(path).read_text(encoding="utf-8"))["steps"]
        return {
            int(num): CacheCalibration(**{name: tuple(map(float, values)) for name, values in entry.items()})
            for num, entry in steps.items()
        }
    except FileNotFoundError:
        raise ArgumentError(
            f"calibration={str(path)!r} is no file; write one with partsong.evals.cache_calibration"
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ArgumentError(f"{path} holds no calibration of a step cache ({problem!r})") from problem


def write_calibrations(path: Path, calibrations: Mapping[int, CacheCalibration], **about: Any) -> None:
    """Writes a file that `read_calibrations` reads.

    Args:
        path: file to write.
        calibrations: by number of steps.
        **about: what else to write down, such as the command.
    """
    steps = {str(num): {k: list(v) for k, v in asdict(entry).items()} for num, entry in sorted(calibrations.items())}
    path.write_text(json.dumps({**about, "steps": steps}, indent=1) + "\n", encoding="utf-8")
