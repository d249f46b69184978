"""Holds and reads the fields that requests for pictures and for videos share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from partsong.serving.errors import ApiError, shortened
from partsong.serving.jobs import Job
from partsong.serving.limits import Limits
from partsong.whole_text import whole_json

__all__ = ["SamplingBody", "page_of", "read_size", "without_null"]

#: Fields that decide elsewhere, and those that clients may send as hints.
_UNUSED = {"model", "size", "user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"}


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
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, fields: Any) -> Any:
        return without_null(fields)

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
        if self.negative_prompt is not None and len(self.negative_prompt) > limits.prompt:
            length = f"the negative prompt has {len(self.negative_prompt)} characters"
            raise ApiError(400, f"{length}; use at most {limits.prompt}", param="negative_prompt")
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields if name not in _UNUSED}
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
        raise ApiError(400, f"size {shortened(text)}: write WIDTHxHEIGHT in pixels, such as 512x512", param="size")
    return int(width), int(height)


def without_null(fields: Any) -> Any:
    """Reads null as a field that is not there, as the official clients write it, and cleans all texts."""
    if not isinstance(fields, dict):
        return fields
    return {name: whole_json(value) for name, value in fields.items() if value is not None}


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
            raise ApiError(404, f"there is no job {shortened(after)}", param="after", code="not_found")
        start = places[0] + 1
    return jobs[start : start + limit], len(jobs) > start + limit
