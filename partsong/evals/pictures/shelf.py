"""Keeps what a comparison has sampled in a folder, so that other metrics or more pictures need no sampling again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError, OutputError
from partsong.evals.reasoning.line_file import LineFile, read_lines

__all__ = ["Frames", "Record", "Shelf"]

#: The file with the settings and a line for each sample.
_LINES = "samples.jsonl"
#: Frames `[F, H, W, 3]` in [0, 1]; a picture is one frame.
Frames = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Says how one picture or video was sampled.

    Attributes:
        way: name of the way to sample.
        number: of the picture.
        prompt: what it shows.
        kind: ``exact``, ``bounded`` or ``approximate``.
        seconds: of the call, on the slowest rank.
        first_frame_seconds: until the first frames of a video were done; None for a picture.
        bytes_sent: by each rank.
    """

    way: str
    number: int
    prompt: str
    kind: str
    seconds: float
    first_frame_seconds: float | None
    bytes_sent: tuple[int, ...]


class Shelf:
    """Opens the folder of a comparison. Frames are kept as arrays, since 8 bits hide small differences.

    Args:
        folder: where it is; made if it is not there.
        settings: what all samples have in common. A folder with other settings is refused.

    Attributes:
        records: what is there, by way and number.

    Raises:
        ArgumentError: the folder holds a comparison with other settings.
        OutputError: the folder cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        _check_settings(folder, settings)
        self._lines = LineFile(folder / _LINES, settings, "comparison")
        rows = [Record(**{**line, "bytes_sent": tuple(line["bytes_sent"])}) for line in self._lines.lines]
        self.records = {(row.way, row.number): row for row in rows if self.path(row.way, row.number).is_file()}

    def path(self, way: str, number: int, suffix: str = ".npy") -> Path:
        """Returns the file of a sample; the folder is called like the way, without marks that file systems lack."""
        return self.folder / re.sub(r"[^\w.+-]+", "-", way) / f"{number:05d}{suffix}"

    def has(self, way: str, number: int, prompt: str) -> bool:
        """Says whether a sample of this prompt is there."""
        record = self.records.get((way, number))
        return record is not None and record.prompt == prompt

    def keep(self, record: Record, frames: Frames) -> None:
        """Writes a sample, first its frames and then its record.

        Raises:
            OutputError: there is no room.
        """
        path = self.path(record.way, record.number)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, frames)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        self._lines.append(asdict(record))
        self.records[record.way, record.number] = record

    def frames(self, way: str, number: int) -> Frames:
        """Reads the frames of a sample."""
        return np.load(self.path(way, number), allow_pickle=False)

    def close(self) -> None:
        """Closes its file."""
        self._lines.close()


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuses a folder with samples of other settings; without samples, its settings are forgotten."""
    path = folder / _LINES
    header, *samples = read_lines(path, "comparison")[0] if path.is_file() else [{}]
    for key in {**settings, **header} if samples else ():
        if header.get(key) != settings.get(key):
            raise ArgumentError(
                f"{folder} holds samples with {key} {header.get(key)}, and {settings.get(key)} is asked for; give "
                f"another folder as --out"
            )
    if not samples:
        path.unlink(missing_ok=True)
