"""Sends files that are still being written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from partsong.errors import DistributedError
from partsong.serving.jobs import Job
from partsong.serving.server import Server

__all__ = ["growing_file"]

#: Bytes per read, and seconds between two checks of a growing file.
_PIECE, _LOOK = 1 << 16, 0.2


async def growing_file(server: Server, job: Job, path: Path) -> AsyncIterator[bytes]:
    """Yields a file to its end, and waits for more while its job is running.

    Raises:
        DistributedError: the ranks died, and the file is made anew; the client sees its stream break off.
    """
    position, losses = 0, job.losses
    while True:
        if job.losses != losses and position:
            raise DistributedError(f"the ranks that made {path.name} ended; it is made anew")
        losses = job.losses
        is_last = job.has_ended
        data = await asyncio.to_thread(_read, path, position)
        position += len(data)
        if data:
            yield data
        elif is_last:
            return
        else:
            async for _ in server.watchers.changes(job, _LOOK):
                break


def _read(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(_PIECE)
    except FileNotFoundError:
        return b""
