"""Answers ``/v1/images``: pictures from text, and from a picture and text."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from PIL import Image
from pydantic import Field, ValidationError
from starlette.datastructures import UploadFile

from partsong.serving.access.addresses import public_url
from partsong.serving.access.own_jobs import user_of
from partsong.serving.errors import ApiError, invalid, leaving, shortened
from partsong.serving.fields import SamplingBody
from partsong.serving.files.sent_pictures import check_pictures, kept_pictures
from partsong.serving.jobs import Job
from partsong.serving.messages import MOST_PICTURES
from partsong.serving.server import Server
from partsong.serving.services import PictureService
from partsong.serving.waiting import STREAMED, completed, event, events_while_there, failure

__all__ = ["ImageRequest", "router"]

router = APIRouter(prefix="/v1/images")

#: Values of quality and style that ask for nothing.
_PLAIN = (None, "auto", "standard")
_FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}


class ImageRequest(SamplingBody):
    """Says which pictures to make.

    Fields of the OpenAI API that cannot be honoured may have their neutral value; any other is refused. Only quality
    and style, which other models offer, may have any value; the reply notes that they change nothing here.
    """

    n: int = 1
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] = 100
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0
    quality: Literal["auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"] = "auto"
    style: Literal["vivid", "natural"] | None = None
    background: Literal["auto", "opaque"] = "auto"
    moderation: Literal["auto", "low"] = "auto"
    input_fidelity: Literal["low", "high"] | None = None
    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    deadline: Annotated[float, Field(gt=0)] | None = None  # seconds from now


@router.post("/generations")
async def generations(body: ImageRequest, request: Request) -> Any:
    """Makes pictures of a prompt; with `stream`, up to three partial pictures on the way."""
    server: Server = request.app.state.server
    model = server.model(body.model, "image")
    job = await _submit(request, model, body, body.asked(server.limits, num=body.n, strength=body.strength))
    return await _respond(server, job, body, request, "image_generation")


@router.post("/edits")
async def edits(request: Request) -> Any:
    """Makes pictures of a prompt and pictures, and of a mask where the pipeline takes one."""
    server: Server = request.app.state.server
    form = await request.form(max_files=MOST_PICTURES + 1, max_fields=64)
    files = [(name, value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
    fields = {name: value for name, value in form.multi_items() if not isinstance(value, UploadFile)}
    try:
        body = ImageRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid(error.errors()[0]) from None
    pictures = [upload for name, upload in files if name in ("image", "image[]")]
    masks = [upload for name, upload in files if name == "mask"]
    if not pictures or len(masks) > 1 or len(files) != len(pictures) + len(masks):
        names = shortened(", ".join(name for name, _ in files) or "none")
        raise ApiError(400, f"send files as image, and perhaps one as mask; found {names}", param="image")
    model = server.model(body.model, "image")
    facts = await server.rooms[model.name].facts()
    check_pictures(facts, model.name, len(pictures), len(masks))
    asked = body.asked(server.limits, num=body.n, strength=body.strength)
    given, mask = [await upload.read() for upload in pictures], await masks[0].read() if masks else None
    async with kept_pictures(server, given, mask) as kept:
        job = await _submit(request, model, body, {**asked, **kept})
    return await _respond(server, job, body, request, "image_edit")


async def _submit(request: Request, model: PictureService, body: ImageRequest, asked: dict[str, Any]) -> Job:
    server: Server = request.app.state.server
    deadline = None if body.deadline is None else time.time() + body.deadline
    previews = body.partial_images if body.stream else 0
    job = await server.submit(model, asked, user=user_of(request), previews=previews, deadline=deadline)
    idle = [f"{name}={value}" for name in ("quality", "style") if (value := getattr(body, name)) not in _PLAIN]
    if idle:
        job.note = f"{' and '.join(idle)} changes nothing here; num_inference_steps and the prompt do"
    return job


async def _respond(server: Server, job: Job, body: ImageRequest, request: Request, kind: str) -> Any:
    """Answers with the pictures once they are there, or with a stream at once."""
    if body.stream:
        events = _stream(server, job, body, kind)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAMED)
    job = await completed(server, job, request)
    return {
        "created": int(job.created_at),
        "data": [await _datum(server, name, body, request) for name in job.files],
        "background": "opaque",
        "output_format": body.output_format,
        "quality": body.quality,
        "size": job.as_json()["size"] or _size_of(server, job),
        "partsong": job.as_json(),
    }


async def _stream(server: Server, job: Job, body: ImageRequest, kind: str) -> AsyncIterator[str]:
    """Yields previews as they come, then the pictures."""
    common = {"created_at": int(job.created_at), "quality": body.quality, "background": "opaque"}
    index = 0
    async for shown in events_while_there(server, job):
        if shown is None:
            yield ": waiting\n\n"
            continue
        for picture in shown[1][:1]:
            data = {"type": f"{kind}.partial_image", "partial_image_index": index, "step": shown[0], **common}
            data |= {
                "b64_json": base64.b64encode(picture).decode(),
                "output_format": "png",
                "size": body.size or "auto",
            }
            yield event(f"{kind}.partial_image", json.dumps(data))
            index += 1
    if job.status != "completed":
        yield event(
            "error", json.dumps((failure(job) if job.has_ended else server.hindrance(job) or leaving()).as_json())
        )
        return
    for name in job.files:
        data = {"type": f"{kind}.completed", **common, "output_format": body.output_format}
        data |= {"b64_json": await asyncio.to_thread(_encoded, server, name, body)}
        data |= {"size": _size_of(server, job), "partsong": job.as_json()}
        yield event(f"{kind}.completed", json.dumps(data))


async def _datum(server: Server, name: str, body: ImageRequest, request: Request) -> dict[str, Any]:
    if body.response_format == "url":
        return {"url": public_url(request, "file", name=name), "revised_prompt": None}
    return {"b64_json": await asyncio.to_thread(_encoded, server, name, body), "revised_prompt": None}


def _encoded(server: Server, name: str, body: ImageRequest) -> str:
    data = server.file(name).read_bytes()
    if body.output_format != "png":
        buffer = io.BytesIO()
        with Image.open(io.BytesIO(data)) as picture:
            picture.convert("RGB").save(buffer, _FORMATS[body.output_format], quality=body.output_compression)
        data = buffer.getvalue()
    return base64.b64encode(data).decode()


def _size_of(server: Server, job: Job) -> str:
    with Image.open(server.file(job.files[0])) as picture:
        return f"{picture.width}x{picture.height}"
