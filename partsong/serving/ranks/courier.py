"""Carries the files of jobs from a replica's first rank to a server on another machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from partsong.serving.messages import FilePart, JobWork

__all__ = ["Courier"]

#: Bytes per message.
_PIECE = 1 << 23


@dataclass(slots=True)
class _Parcel:
    """Holds where a file is written here, where the server wants it, and how many of its bytes are sent."""

    here: Path
    there: Path
    sent: int = 0


class Courier:
    """Lets the ranks write to a folder of their own machine, and sends the server what is new there.

    A video grows only at its end, so its frames can be sent while later ones are made. A picture appears in one piece
    or not at all.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="partsong-ranks-")
        self._parcels: dict[str, list[_Parcel]] = {}

    def take(self, work: JobWork) -> JobWork:
        """Returns a job whose files are written here."""
        parcels = [_Parcel(Path(self._folder.name) / path.name, path) for path in work.out]
        self._parcels[work.id] = parcels
        return replace(work, out=tuple(parcel.here for parcel in parcels))

    def parts(self, name: str) -> Iterator[FilePart]:
        """Yields what has been written for a job since the last call."""
        for parcel in self._parcels.get(name, ()):
            if not parcel.here.is_file():
                continue
            with parcel.here.open("rb") as file:
                file.seek(parcel.sent)
                while data := file.read(_PIECE):
                    yield FilePart(id=name, path=parcel.there, data=data, is_first=parcel.sent == 0)
                    parcel.sent += len(data)

    def forget(self, name: str) -> None:
        """Removes the files of a job that has ended."""
        for parcel in self._parcels.pop(name, ()):
            parcel.here.unlink(missing_ok=True)
