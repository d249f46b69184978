"""Says how one model of pictures or videos is served, and what its ranks do for a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.serving.errors import ApiError, shortened
from partsong.serving.jobs import Job
from partsong.serving.messages import JobWork, Ready
from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["AUTO", "SERIAL", "PictureService", "files_of", "find_model", "pictures_of", "work_of"]

SERIAL, AUTO = "serial", "auto"
#: How clients know the arguments of a call.
_SHOWN = {"num_inference_steps": "steps", "guidance_scale": "guidance", "num_frames": "frames"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureService:
    """Says how one model of pictures or videos is served.

    Attributes:
        name: that clients know it by.
        nproc: number of ranks.
        settings: those with which the ranks are started.
        kind: ``image`` or ``video``.
        strategy: what runs it where a client asks for ``auto``; empty for one rank.
        advice: why.
    """

    name: str
    nproc: int
    settings: ReplicaSettings
    kind: str
    strategy: tuple[str, ...] = ()
    advice: str | None = None

    def strategies(self, asked: str | None) -> tuple[tuple[str, ...], str | None]:
        """Returns the strategies of a request, and why where the server chose them.

        Raises:
            ApiError: auto or serial stands beside others.
        """
        if asked in (None, AUTO):
            return self.strategy, self.advice
        names = tuple(str(asked).split("+"))
        if len(names) > 1 and {AUTO, SERIAL} & set(names):
            message = f"strategy {shortened(asked)}: {AUTO} and {SERIAL} stand alone; leave the others out"
            raise ApiError(400, message, param="strategy")
        return (() if names == (SERIAL,) else names), None

    def as_json(self, facts: Ready | None) -> dict[str, Any]:
        """Returns the model as ``GET /v1/models`` lists it, with what its ranks said of it once they did."""
        legal = () if facts is None else facts.strategies
        defaults = {} if facts is None else facts.defaults
        shown = {_SHOWN.get(key, key): value for key, value in defaults.items()}
        return {
            "id": self.name,
            "kind": self.kind,
            "strategies": [AUTO, *legal, SERIAL],
            "defaults": shown,
            "denoiser": None if facts is None else dict(facts.denoiser),
            "most_pictures": 0 if facts is None else facts.most_pictures,
            "takes_mask": facts is not None and facts.takes_mask,
        }


def find_model(models: Sequence[PictureService], name: str | None, kind: str) -> PictureService:
    """Returns a model by name; without one, the first of the kind.

    Raises:
        ApiError: there is none.
    """
    known = [model for model in models if model.kind == kind]
    for model in known:
        if name in (None, model.name):
            return model
    names = ", ".join(model.name for model in known) or "none"
    named = f"no {kind} model {shortened(name)} is served here; these are: {names}"
    message = named if name else f"no {kind} model is served"
    raise ApiError(404, message, param="model", code="model_not_found")


def files_of(job: Job) -> tuple[str, ...]:
    """Returns the names of the files that a job makes."""
    if job.kind == "video":
        return (f"{job.id}.mp4",)
    return tuple(f"{job.id}-{index}.png" for index in range(job.request.get("n", 1)))


def pictures_of(job: Job) -> list[str]:
    """Returns the names of the pictures that a job begins with, without its mask."""
    sent = job.request.get("picture") or []
    return [sent] if isinstance(sent, str) else list(sent)


def work_of(
    job: Job, file: Callable[[str], Path], defaults: Mapping[str, Any], strategies: tuple[str, ...], **more: Any
) -> JobWork:
    """Returns the work of the ranks for a job.

    Args:
        job: the job.
        file: returns the path of a file by name.
        defaults: of the model, which the request overrides.
        strategies: of the job.
        **more: fields of `JobWork` that are no part of the request.
    """
    request = job.request
    names = ("height", "width", "num_inference_steps", "guidance_scale", "negative_prompt", "strength")
    arguments = {name: request[name] for name in names if request.get(name) is not None}
    names_out = files_of(job)
    return JobWork(
        id=job.id,
        prompt=request["prompt"],
        arguments={**defaults, **arguments},
        num=len(names_out),
        seed=request["seed"],
        strategies=strategies,
        lora=request.get("lora"),
        out=tuple(map(file, names_out)),
        num_frames=request.get("num_frames"),
        user=job.user,
        fps=request.get("fps") or 16.0,
        pictures=tuple(map(file, pictures_of(job))),
        mask=None if request.get("mask") is None else file(request["mask"]),
        **more,
    )
