"""Waits for a job while the client that asked for it is still connected."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Request

from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job
from partsong.serving.server import Server

__all__ = ["STREAMED", "completed", "event", "events_while_there", "failure"]

#: Headers of a stream of events, which a proxy must neither collect nor keep.
STREAMED = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache"}
#: Seconds between two checks that the client is still connected.
_LOOK = 0.5
#: Status of a reply by the code of a job's error, where it is not 500.
_STATUS = {"refused": 400, "no_room": 507}


async def completed(server: Server, job: Job, request: Request) -> Job:
    """Waits until a job is done; drops it when its client hangs up.

    Raises:
        ApiError: the job failed, or was cancelled.
    """
    try:
        async for _ in server.watchers.changes(job, _LOOK):
            if await request.is_disconnected():
                break
            if (hindrance := server.hindrance(job)) is not None:
                raise hindrance
    finally:
        server.cancel(job)
    if job.status == "completed":
        return job
    raise failure(job)


def failure(job: Job) -> ApiError:
    """Returns the error of a job that did not finish; a client that repeats the request would only get it again."""
    if job.error is None:
        return ApiError(409, f"job {job.id} was cancelled", code="cancelled", is_final=True)
    code = job.error["code"]
    return ApiError(_STATUS.get(code, 500), job.error["message"], code=code, is_final=code != "ranks_ended")


async def events_while_there(server: Server, job: Job) -> AsyncIterator[tuple[int, tuple[bytes, ...]] | None]:
    """Yields each preview of a job, and None at every other change or after a while without one.

    When the consumer ends early, as it does when its client hangs up, the job is dropped.
    """
    shown = 0
    try:
        async for _ in server.watchers.changes(job, _LOOK):
            if server.hindrance(job) is not None:
                break
            step, pictures = server.watchers.preview(job.id)
            yield (step, pictures) if step > shown else None
            shown = max(shown, step)
    finally:
        server.cancel(job)


def event(name: str, data: str) -> str:
    """Returns one event of a stream."""
    return f"event: {name}\ndata: {data}\n\n"
