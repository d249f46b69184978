"""Finds the jobs of whoever sent a request; those of other users are not there for them."""

from __future__ import annotations

from fastapi import Request

from partsong.serving.access.users import User
from partsong.serving.errors import ApiError, shortened
from partsong.serving.jobs import Job

__all__ = ["check_operator", "job_of", "jobs_of", "user_of"]


def user_of(request: Request) -> User:
    """Returns who sent a request, as the gate has noted."""
    return request.state.user


def check_operator(request: Request) -> None:
    """Refuses what is of all users to those who are no operators.

    Raises:
        ApiError: the sender is no operator.
    """
    if not user_of(request).is_operator:
        raise ApiError(403, "this is for operators; show the key of one", code="not_operator")


def jobs_of(request: Request) -> list[Job]:
    """Lists the jobs that the sender of a request may see, the oldest first."""
    user = user_of(request)
    return [job for job in request.app.state.server.jobs.values() if user.sees(job.user)]


def job_of(request: Request, name: str, kind: str | None = None) -> Job:
    """Returns a job by name.

    Args:
        request: of who asks for it.
        name: of the job.
        kind: what it makes; None for anything.

    Raises:
        ApiError: there is none, or it is another user's.
    """
    job = request.app.state.server.jobs.get(name)
    if job is None or kind not in (None, job.kind) or not user_of(request).sees(job.user):
        message = f"there is no {kind or 'job'} {shortened(name)}; they are forgotten after a time"
        raise ApiError(404, message, code="not_found")
    return job
