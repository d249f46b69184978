"""Answers ``/v1/denoise``: calls of a denoiser by clients with a sampler of their own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from partsong.serving.access.own_jobs import user_of
from partsong.serving.answers.hangup import HUNG_UP, HungUpError, unless_hung_up
from partsong.serving.denoising.sessions import DenoiseSession
from partsong.serving.fields import without_null
from partsong.serving.messages import DenoiseAnswer
from partsong.serving.server import Server
from partsong.serving.services import PictureService

__all__ = ["SessionRequest", "router"]

T = TypeVar("T")

router = APIRouter(prefix="/v1/denoise")


class SessionRequest(BaseModel):
    """Says which denoiser a client will call, and how the ranks share each call."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    strategy: str | None = None
    lora: str | None = None
    pause: Annotated[float, Field(ge=0.5, le=60)] = 30.0  # seconds without a call after which the session ends

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, fields: Any) -> Any:
        return without_null(fields)


@router.post("")
async def denoise(
    request: Request, model: str | None = None, strategy: str | None = None, lora: str | None = None
) -> Response:
    """Makes one call of a denoiser: its arguments and its prediction are safetensors files."""
    server: Server = request.app.state.server
    body = await request.body()

    async def call() -> DenoiseAnswer:
        session = await server.sessions.open(_model(server, model), strategy, lora, user_of(request))
        try:
            return await server.sessions.call(session, body)
        finally:
            server.sessions.close(session)

    return await _unless_left(request, call(), _reply)


@router.post("/sessions", status_code=201)
async def begin(body: SessionRequest, request: Request) -> Response:
    """Opens a session, whose calls are the steps of one generation; answers once it has the ranks."""
    server: Server = request.app.state.server
    model, user = _model(server, body.model), user_of(request)
    opened = server.sessions.open(model, body.strategy, body.lora, user, pause=body.pause)
    return await _unless_left(request, opened, lambda session: JSONResponse(session.as_json(), status_code=201))


@router.post("/sessions/{name}")
async def step(name: str, request: Request) -> Response:
    """Makes the next call of a session, as `POST /v1/denoise` does."""
    server: Server = request.app.state.server
    return _reply(await server.sessions.call(_session(request, name), await request.body()))


@router.get("/sessions/{name}")
async def state(name: str, request: Request) -> dict[str, Any]:
    """Says what a session calls, and what its calls have cost each rank."""
    return _session(request, name).as_json()


@router.delete("/sessions/{name}")
async def end(name: str, request: Request) -> dict[str, Any]:
    """Closes a session, and returns what it has cost."""
    server: Server = request.app.state.server
    session = _session(request, name)
    server.sessions.close(session)
    return {**session.as_json(), "deleted": True}


async def _unless_left(request: Request, work: Coroutine[Any, Any, T], reply: Callable[[T], Response]) -> Response:
    """Returns the reply to a request, and ends its work where the client has left."""
    try:
        return reply(await unless_hung_up(request, work))
    except HungUpError:
        return Response(status_code=HUNG_UP)


def _session(request: Request, name: str) -> DenoiseSession:
    return request.app.state.server.sessions.find(name, user_of(request))


def _model(server: Server, name: str | None) -> PictureService:
    """Returns a model of any kind by name; without one, the first."""
    wanted = server.served_names.target(name)
    kind = next((model.kind for model in server.models if wanted in (None, model.name)), "image")
    return server.model(name, kind)


def _reply(answered: DenoiseAnswer) -> Response:
    headers = {"X-Partsong-Seconds": f"{answered.seconds:.6f}"}
    return Response(answered.body, media_type="application/octet-stream", headers=headers)
