"""Reads fields that requests of several kinds have."""

from __future__ import annotations

from collections.abc import Sequence

from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job

__all__ = ["page_of", "read_size"]


def read_size(text: str | None) -> tuple[int | None, int | None]:
    """Reads ``WxH``; None for both where the model shall choose.

    Raises:
        ApiError: it is something else.
    """
    if text in (None, "auto"):
        return None, None
    width, _, height = str(text).partition("x")
    if not (width.isdigit() and height.isdigit() and 0 < len(width) < 6 and 0 < len(height) < 6):
        raise ApiError(400, f"size {text!r}: write WIDTHxHEIGHT in pixels, such as 512x512", param="size")
    return int(width), int(height)


def page_of(jobs: Sequence[Job], after: str | None, limit: int) -> tuple[Sequence[Job], bool]:
    """Returns some jobs that follow a named one, and whether more follow.

    Raises:
        ApiError: the limit is out of range, or the named one is not there.
    """
    if not 1 <= limit <= 100:
        raise ApiError(400, f"limit={limit}; use a number from 1 to 100", param="limit")
    start = 0
    if after is not None:
        places = [place for place, job in enumerate(jobs) if job.id == after]
        if not places:
            raise ApiError(404, f"there is no job {after!r}", param="after", code="not_found")
        start = places[0] + 1
    return jobs[start : start + limit], len(jobs) > start + limit
