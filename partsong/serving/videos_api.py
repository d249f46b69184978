"""Answers ``/v1/videos``: starts, lists, streams and stops jobs of videos."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Annotated, Any, Literal

import imageio.v3 as imageio
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from PIL import Image
from pydantic import Field, ValidationError

from partsong.serving.access.own_jobs import job_of, jobs_of, user_of
from partsong.serving.answers.chat_fields import read_fields
from partsong.serving.errors import ApiError, invalid
from partsong.serving.expiry import remove_jobs
from partsong.serving.fields import SamplingBody, page_of
from partsong.serving.files.growing import growing_file
from partsong.serving.files.sent_pictures import check_pictures, copied_picture, kept_pictures, read_reference
from partsong.serving.jobs import Job
from partsong.serving.server import Server
from partsong.serving.services import pictures_of
from partsong.serving.waiting import STREAMED

__all__ = ["VideoRequest", "router"]

router = APIRouter(prefix="/v1/videos")


class VideoRequest(SamplingBody):
    """Says which video to make."""

    seconds: Annotated[float, Field(gt=0, le=3600)] | None = None
    fps: Annotated[float, Field(gt=0, le=240)] = 16.0
    num_frames: int | None = None


@router.post("")
async def create(request: Request) -> dict[str, Any]:
    """Begins a video of a prompt, and of a picture where the pipeline takes one."""
    server: Server = request.app.state.server
    is_form = request.headers.get("content-type", "").startswith("multipart/")
    fields = dict(await request.form(max_files=1, max_fields=64)) if is_form else await _json(request)
    given = fields.pop("input_reference", None)
    try:
        body = VideoRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors()[0]) from None
    if given is None:
        return as_video(server, await begin_video(request, body))
    model = server.model(body.model, "video")
    check_pictures(await server.rooms[model.name].facts(), model.name, 1, 0, "input_reference")
    async with kept_pictures(server, [await read_reference(given)], field="input_reference") as kept:
        return as_video(server, await begin_video(request, body, **kept))


async def begin_video(request: Request, body: VideoRequest, **more: Any) -> Job:
    """Submits a video; see `Server.submit`."""
    server: Server = request.app.state.server
    model = server.model(body.model, "video")
    frames = body.num_frames or (None if body.seconds is None else max(1, round(body.seconds * body.fps)))
    asked = body.asked(server.limits, frames=frames, fps=body.fps, **more)
    return await server.submit(model, asked, user=user_of(request))


@router.get("")
async def every(
    request: Request, after: str | None = None, limit: int = 20, order: Literal["asc", "desc"] = "desc"
) -> dict[str, Any]:
    """Lists videos."""
    server: Server = request.app.state.server
    jobs = [job for job in jobs_of(request) if job.kind == "video"]
    jobs = jobs if order == "asc" else jobs[::-1]
    shown, has_more = page_of(jobs, after, limit)
    data = [as_video(server, job) for job in shown]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


@router.get("/{name}")
async def one(name: str, request: Request, response: Response) -> dict[str, Any]:
    """Returns the state of a video."""
    server: Server = request.app.state.server
    response.headers["openai-poll-after-ms"] = "500"
    return as_video(server, job_of(request, name, "video"))


@router.delete("/{name}")
async def delete(name: str, request: Request) -> dict[str, Any]:
    """Stops a video if it is not done, and removes it."""
    server: Server = request.app.state.server
    job = job_of(request, name, "video")
    await server.drop(job)
    await remove_jobs(server, [job])
    return {"id": name, "object": "video.deleted", "deleted": True}


@router.post("/{name}/remix")
async def remix(name: str, request: Request) -> dict[str, Any]:
    """Begins a video with the settings of another one and a new prompt."""
    server: Server = request.app.state.server
    job = job_of(request, name, "video")
    fields = await _json(request)
    if set(fields) != {"prompt"} or not isinstance(fields["prompt"], str):
        raise ApiError(400, "a remix takes a prompt and nothing else", param="prompt")
    before = {key: value for key, value in job.request.items() if key in VideoRequest.model_fields}
    size = job.as_json()["size"]
    body = VideoRequest.model_validate({**before, "model": job.model, "size": size, "prompt": fields["prompt"]})
    async with kept_pictures(server, [copied_picture(server, each) for each in pictures_of(job)]) as kept:
        return as_video(server, await begin_video(request, body, remixed_from=name, **kept))


@router.get("/{name}/content")
async def content(
    name: str, request: Request, variant: Literal["video", "thumbnail", "spritesheet"] = "video"
) -> Response:
    """Returns the file of a video, sent while it is still written; or its first frame."""
    server: Server = request.app.state.server
    job = job_of(request, name, "video")
    path = server.file(f"{job.id}.mp4")
    if variant != "video":
        return await asyncio.to_thread(_still, job, path, variant)
    return StreamingResponse(growing_file(server, job, path), media_type="video/mp4", headers=STREAMED)


def as_video(server: Server, job: Job) -> dict[str, Any]:
    """Returns a job by the keys of the OpenAI API."""
    whole = job.as_json(server.position(job))
    status = "failed" if job.status == "cancelled" else job.status
    error = {"code": "cancelled", "message": "the job was cancelled"} if job.status == "cancelled" else job.error
    frames = job.request.get("num_frames")
    return {
        **{key: whole[key] for key in ("id", "model", "created_at", "completed_at", "expires_at", "progress")},
        "object": "video",
        "status": status,
        "error": error,
        "prompt": job.request["prompt"],
        "size": whole["size"],
        "seconds": None if frames is None else f"{frames / job.request.get('fps', 16.0):g}",
        "remixed_from_video_id": job.request.get("remixed_from"),
        "partsong": whole,
    }


def _still(job: Job, path: Path, variant: str) -> Response:
    """Returns the first frame, or a row of five frames."""
    if job.status != "completed":
        raise ApiError(409, f"video {job.id} is {job.status}; a {variant} is made when it is completed")
    frames = imageio.imread(path, plugin="FFMPEG")
    chosen = frames[:1] if variant == "thumbnail" else frames[:: max(1, len(frames) // 5)][:5]
    sheet = Image.new("RGB", (chosen.shape[2] * len(chosen), chosen.shape[1]))
    for place, frame in enumerate(chosen):
        sheet.paste(Image.fromarray(frame), (place * frame.shape[1], 0))
    buffer = io.BytesIO()
    kind = "WEBP" if variant == "thumbnail" else "JPEG"
    sheet.save(buffer, kind)
    return Response(buffer.getvalue(), media_type=f"image/{kind.lower()}")


async def _json(request: Request) -> Any:
    return read_fields(await request.body())
