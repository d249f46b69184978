"""Waits for a job while the client that asked for it is still connected."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Request

from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job
from partsong.serving.server import Server

__all__ = ["completed", "event", "events_while_there"]

#: Seconds between two checks that the client is still connected.
_LOOK = 0.5


async def completed(server: Server, job: Job, request: Request) -> Job:
    """Waits until a job is done; drops it when its client hangs up.

    Raises:
        ApiError: the job failed, or was cancelled.
    """
    try:
        async for _ in server.watchers.changes(job, _LOOK):
            if await request.is_disconnected():
                break
    finally:
        server.cancel(job)
    if job.status == "completed":
        return job
    raise failure(job)


def failure(job: Job) -> ApiError:
    """Returns the error of a job that did not finish."""
    if job.error is None:
        return ApiError(409, f"job {job.id} was cancelled", code="cancelled")
    status = 400 if job.error["code"] == "refused" else 500
    return ApiError(status, job.error["message"], code=job.error["code"])


async def events_while_there(server: Server, job: Job) -> AsyncIterator[tuple[int, tuple[bytes, ...]] | None]:
    """Yields each preview of a job, and None at every other change or after a while without one.

    When the consumer ends early, as it does when its client hangs up, the job is dropped.
    """
    shown = 0
    try:
        async for _ in server.watchers.changes(job, _LOOK):
            step, pictures = server.watchers.preview(job.id)
            yield (step, pictures) if step > shown else None
            shown = max(shown, step)
    finally:
        server.cancel(job)


def event(name: str, data: str) -> str:
    """Returns one event of a stream."""
    return f"event: {name}\ndata: {data}\n\n"
