"""Answers for jobs of any kind, their files, the models, and how the server is."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import Field

from partsong.serving.access.own_jobs import check_operator, job_of, jobs_of, user_of
from partsong.serving.errors import ApiError
from partsong.serving.fields import SamplingBody, page_of
from partsong.serving.files.growing import growing_file
from partsong.serving.files.sent_pictures import check_pictures, kept_pictures, read_data_url
from partsong.serving.jobs import Job
from partsong.serving.server import Server
from partsong.serving.services import SERIAL
from partsong.serving.twins import difference_map
from partsong.serving.waiting import STREAMED, event

__all__ = ["JobRequest", "router"]

router = APIRouter()

#: Names of the files that the server makes; any other name is refused.
_FILE = re.compile(r"(image|video)_[0-9a-f]{24}(-\d+)?\.(png|mp4)")
#: Number of previews of a job that may be watched.
_PREVIEWS = 6


class JobRequest(SamplingBody):
    """Says what to make, without waiting for it."""

    kind: Literal["image", "video"]
    n: int = 1
    num_frames: int | None = None
    fps: Annotated[float, Field(gt=0, le=240)] | None = None
    pictures: tuple[str, ...] = ()  # to begin with, as data: addresses
    mask: str | None = None
    strength: Annotated[float, Field(gt=0, le=1)] | None = None


@router.post("/v1/jobs", status_code=202)
async def create(body: JobRequest, request: Request) -> dict[str, Any]:
    """Begins a picture or a video as a job, of a prompt and perhaps of `pictures` in base64."""
    server: Server = request.app.state.server
    if body.kind == "video" and body.n != 1:
        raise ApiError(400, f"n={body.n}: one job makes one video; ask for each", param="n")
    for name in ("num_frames", "fps") if body.kind == "image" else ():
        if getattr(body, name) is not None:
            raise ApiError(400, f"a picture has no {name}; leave it out", param=name)
    model = server.model(body.model, body.kind)
    if body.pictures or body.mask is not None:
        facts = await server.rooms[model.name].facts()
        check_pictures(facts, model.name, len(body.pictures), int(body.mask is not None), "pictures")
    more = {"fps": body.fps, "strength": body.strength}
    asked = body.asked(server.limits, num=body.n, frames=body.num_frames, **more)
    given = [read_data_url(each, "pictures") for each in body.pictures]
    mask = None if body.mask is None else read_data_url(body.mask, "mask")
    async with kept_pictures(server, given, mask, field="pictures") as kept:
        job = await server.submit(model, {**asked, **kept}, user=user_of(request), previews=_PREVIEWS)
    return _shown(server, job)


@router.get("/v1/jobs")
async def every(
    request: Request, after: str | None = None, limit: int = 20, status: str | None = None
) -> dict[str, Any]:
    """Lists jobs, the newest first."""
    server: Server = request.app.state.server
    jobs = [job for job in reversed(jobs_of(request)) if status in (None, job.status)]
    shown, has_more = page_of(jobs, after, limit)
    return {"object": "list", "data": [_shown(server, job) for job in shown], "has_more": has_more}


@router.get("/v1/jobs/{name}")
async def one(name: str, request: Request) -> dict[str, Any]:
    """Says where a job stands, with the bytes and the waiting of each rank."""
    server: Server = request.app.state.server
    return _shown(server, job_of(request, name))


@router.post("/v1/jobs/{name}/cancel")
@router.delete("/v1/jobs/{name}")
async def cancel(name: str, request: Request) -> dict[str, Any]:
    """Cancels a job, whether it waits or runs."""
    server: Server = request.app.state.server
    job = job_of(request, name)
    await server.drop(job)
    return _shown(server, job)


@router.get("/v1/jobs/{name}/events")
async def events(name: str, request: Request) -> StreamingResponse:
    """Streams each change of a job until it has ended; hanging up does not stop the job."""
    server: Server = request.app.state.server
    events = _events(server, job_of(request, name))
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAMED)


@router.post("/v1/jobs/{name}/twin", status_code=202)
async def twin(name: str, request: Request) -> dict[str, Any]:
    """Begins the serial twin of a job: the same call on one rank, with nothing attached."""
    server: Server = request.app.state.server
    job = job_of(request, name)
    if job.twin_of is not None:
        raise ApiError(400, "this job is a serial twin itself")
    if job.twin in server.jobs:
        return _shown(server, server.jobs[job.twin])
    model = server.model(job.model, job.kind)
    asked = {**job.request, "strategy": SERIAL}
    owner = replace(user_of(request), name=job.user)
    begun = await server.submit(model, asked, user=owner, twin_of=job.id, previews=_PREVIEWS)
    job.twin = begun.id
    server.save(job)
    return _shown(server, begun)


@router.get("/v1/jobs/{name}/difference")
async def difference(name: str, request: Request, index: int = 0) -> Response:
    """Returns where a picture or video differs from its serial twin: black where equal, white where most."""
    server: Server = request.app.state.server
    job = job_of(request, name)
    other = server.jobs.get(job.twin or job.twin_of or "")
    if other is None or {job.status, other.status} != {"completed"}:
        raise ApiError(409, f"job {name} and its serial twin are not both completed", code="no_twin")
    if not 0 <= index < len(job.files):
        raise ApiError(400, f"index={index}; the job has {len(job.files)} files", param="index")
    pair = server.file(job.files[index]), server.file(other.files[index])
    drawn, largest = await asyncio.to_thread(difference_map, *pair)
    return Response(drawn, media_type="image/png", headers={"X-Max-Abs-Diff": f"{largest:.6g}"})


@router.get("/v1/files/{name}", name="file")
async def file(name: str, request: Request) -> Response:
    """Returns a picture, or a video that is sent while it is still written."""
    server: Server = request.app.state.server
    path = server.file(name)
    job = server.jobs.get(path.stem.partition("-")[0])
    is_other = job is not None and not user_of(request).sees(job.user)
    if is_other or _FILE.fullmatch(name) is None or not (path.is_file() or job is not None):
        raise ApiError(404, f"there is no file {name!r}; files are removed after a time", code="not_found")
    if path.suffix == ".mp4" and job is not None and not job.has_ended:
        return StreamingResponse(growing_file(server, job, path), media_type="video/mp4", headers=STREAMED)
    if not path.is_file():
        raise ApiError(404, f"there is no file {name!r} yet", code="not_found")
    return FileResponse(path)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """Lists what is served."""
    server: Server = request.app.state.server
    return {"object": "list", "data": _model_rows(server)}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describes one model."""
    server: Server = request.app.state.server
    for row in _model_rows(server):
        if row["id"] == name:
            return row
    raise ApiError(404, f"no model {name!r} is served here", param="model", code="model_not_found")


@router.get("/v1/support")
async def support() -> dict[str, Any]:
    """Says which strategy works on which architecture."""
    from partsong.samplers.support import support_rows

    return {"rows": await asyncio.to_thread(support_rows)}


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Says that the server is up, and which models cannot be started for the time being, and why."""
    server: Server = request.app.state.server
    troubles = {name: str(trouble) for name, trouble in server.troubles.items()}
    return {"status": "degraded", "models": troubles} if troubles else {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Says whether all ranks have answered recently."""
    server: Server = request.app.state.server
    missing = server.missing
    return JSONResponse({"ready": not missing, "missing": missing}, status_code=503 if missing else 200)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Returns the counters as Prometheus reads them, to operators: they name all users."""
    check_operator(request)
    server: Server = request.app.state.server
    server.metrics.show_failing(server.troubles)
    return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _events(server: Server, job: Job) -> AsyncIterator[str]:
    shown = 0
    yield event("job", json.dumps(_shown(server, job)))
    async for changed in server.watchers.changes(job, 5.0):
        if server.leaves(job):
            break
        step, pictures = server.watchers.preview(job.id)
        if step > shown:
            shown = step
            for index, picture in enumerate(pictures):
                data = {"b64_json": base64.b64encode(picture).decode(), "step": step, "index": index}
                yield event("preview", json.dumps(data))
        yield event("job", json.dumps(_shown(server, job))) if changed else ": waiting\n\n"
    yield event("job", json.dumps(_shown(server, job)))


def _model_rows(server: Server) -> list[dict[str, Any]]:
    rows = [model.as_json(server.replicas[model.name].facts) for model in server.models]
    rows += [text.as_json() for text in server.texts.values()]
    rows += server.served_names.rows(rows)
    return [{"object": "model", "created": server.created, "owned_by": "partsong", **row} for row in rows]


def _shown(server: Server, job: Job) -> dict[str, Any]:
    return job.as_json(server.position(job))
