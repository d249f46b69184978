"""Holds and reads the fields that requests for pictures and for videos share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job
from partsong.serving.limits import Limits

__all__ = ["SamplingBody", "page_of", "read_size"]


class SamplingBody(BaseModel):
    """Says what to sample, by the names of the OpenAI API and some of diffusers; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    prompt: str
    model: str | None = None
    size: str | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] | None = None
    negative_prompt: str | None = None
    strategy: str | None = None
    lora: str | None = None

    def asked(self, limits: Limits, *, num: int = 1, frames: int | None = None, **more: Any) -> dict[str, Any]:
        """Returns what is asked for, by the names of `Job.request`; fields that are not set are left out.

        Args:
            limits: what one request may ask for.
            num: number of pictures.
            frames: of a video.
            **more: what only one kind of request has.

        Raises:
            ApiError: the size cannot be read, or it is too much.
        """
        width, height = read_size(self.size)
        steps = self.num_inference_steps
        limits.check(prompt=self.prompt, num=num, width=width, height=height, steps=steps, frames=frames)
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields if name not in ("model", "size")}
        given = {**shared, "n": num, "num_frames": frames, "width": width, "height": height, **more}
        return {name: value for name, value in given.items() if value is not None}


def read_size(text: str | None) -> tuple[int | None, int | None]:
    """Reads ``WxH``; None for both where the model should choose.

    Raises:
        ApiError: the text has another form.
    """
    if text in (None, "auto"):
        return None, None
    width, _, height = str(text).partition("x")
    if not (width.isdigit() and height.isdigit() and 0 < len(width) < 6 and 0 < len(height) < 6):
        raise ApiError(400, f"size {text!r}: write WIDTHxHEIGHT in pixels, such as 512x512", param="size")
    return int(width), int(height)


def page_of(jobs: Sequence[Job], after: str | None, limit: int) -> tuple[Sequence[Job], bool]:
    """Returns a page of the jobs after a named one, and whether more follow.

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
