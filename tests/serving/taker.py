"""A server that answers as if its ranks were there and had drawn everything already, in one colour."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job
from partsong.serving.messages import Ready
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.server import Server
from partsong.serving.services import PictureService, files_of

_SETTINGS = ReplicaSettings(folder=Path(), pipeline="", defaults={}, loras={}, address="", authkey=b"")


class Taker(Server):
    """Notes the jobs that it takes, and refuses those whose prompt is "fail".

    Of its models ``several`` begins with several pictures, ``one`` with one, and any other with text alone.
    """

    def prepare(self) -> None:
        """Does what the start of a server does, without ranks."""
        self.open()
        self.created = 1_800_000_000
        for model in self.models:
            found = _facts(model)
            self.replicas[model.name] = SimpleNamespace(facts=found)  # type: ignore[assignment]
            self.rooms[model.name] = SimpleNamespace(facts=partial(_soon, found))  # type: ignore[assignment]

    async def submit(self, model: PictureService, request: Mapping[str, Any], **more: Any) -> Job:
        if request["prompt"] == "fail":
            raise ApiError(400, "refused by the ranks")
        name = f"{model.kind}_{len(self.jobs):024x}"
        job = Job(id=name, kind=model.kind, model=model.name, request={"seed": 7, **request}, status="completed")  # type: ignore[arg-type]
        job.files = files_of(job)
        if job.kind == "image":
            for each in job.files:
                self.file(each).write_bytes(png("red", request.get("width", 64)))
        self.jobs[job.id] = job
        return job


def _facts(model: PictureService) -> Ready:
    several, some = model.name == "several", model.name in ("one", "several")
    kind = model.kind
    return Ready(strategies=(), defaults={}, kind=kind, takes_picture=some, takes_pictures=several, takes_mask=some)


async def _soon(found: Ready) -> Ready:
    return found


def service(name: str, kind: str) -> PictureService:
    """A model of pictures or videos."""
    return PictureService(name=name, nproc=1, settings=_SETTINGS, kind=kind)


def png(colour: str, size: int = 8) -> bytes:
    """A picture in one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(buffer, "PNG")
    return buffer.getvalue()
