"""Makes the web application of a server: its routes, who may use them, and what an error looks like."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partsong import __version__
from partsong.errors import PartsongError
from partsong.serving import chat_api, images_api, jobs_api, page_api, videos_api
from partsong.serving.errors import ApiError, as_api_error, invalid
from partsong.serving.server import Server

__all__ = ["build_app", "endpoints"]

#: What answers requests, in the order of the documentation's table.
_APIS = (images_api, videos_api, chat_api, jobs_api, page_api)

_log = logging.getLogger(__name__)

#: What anybody may see without a key: the page and its parts, which hold no data, and whether the server is up.
_OPEN = (*page_api.PAGE_PATHS, "/health", "/ready")


def build_app(server: Server) -> FastAPI:
    """Returns the application; its lifespan starts the server and ends it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.close()

    app = FastAPI(title="partsong", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    for api in _APIS:
        app.include_router(api.router)
    app.add_exception_handler(PartsongError, _partsong_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(_Gate, server=server)
    return app


def endpoints() -> dict[tuple[str, ...], Callable[..., Any]]:
    """Returns what answers each request by its methods and paths, such as ``GET /health``; pages are left out."""
    paths: dict[Callable[..., Any], list[str]] = {}
    routes = [route for api in _APIS for route in api.router.routes if isinstance(route, APIRoute)]
    for route in (route for route in routes if route.include_in_schema):
        paths.setdefault(route.endpoint, []).extend(f"{method} {route.path}" for method in sorted(route.methods or ()))
    return {tuple(each): answer for answer, each in paths.items()}


def _reply(error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"Retry-After": str(max(1, round(error.retry_after)))}
    return JSONResponse(error.as_json(), status_code=error.status, headers=headers)


async def _partsong_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PartsongError)
    return _reply(as_api_error(error))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _reply(invalid(error.errors()[0]))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _reply(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _unexpected(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _reply(ApiError(500, "the server failed on this request; its log says why"))


class _Gate:
    """Lets in requests that show the key, are not too large, and arrive in time.

    Args:
        app: the application that it guards.
        server: holds the key and the limits.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.server.key is None and not _is_here(headers.get(b"host", b"")):
            # Without a key, a name that another site points to this machine would open the server to that site.
            await _refuse(send, ApiError(403, "without a key this server answers to names of its own machine only"))
            return
        if not self._has_key(scope["path"], headers):
            await _refuse(send, ApiError(401, "show the key of this server as Authorization: Bearer KEY"))
            return
        limits = self.server.limits
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limits.body:
            await _refuse(send, ApiError(413, f"a request has at most {limits.body} bytes", code="too_large"))
            return
        body = _Body(receive, limits.body, limits.body_seconds)
        await self.app(scope, body.receive, body.instead(send))

    def _has_key(self, path: str, headers: dict[bytes, bytes]) -> bool:
        if self.server.key is None or path in _OPEN:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self.server.key.encode())


def _is_here(host: bytes) -> bool:
    """Says whether a request was sent to a name of this machine, with any port or none."""
    name = host.decode("latin-1").lower()
    name = name[1 : name.index("]")] if name.startswith("[") and "]" in name else name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Body:
    """Passes the parts of a body on while they are few enough and in time; otherwise acts as if the client hung up.

    Args:
        receive: where the parts come from.
        most: most bytes of the body.
        seconds: most seconds for all of it.
    """

    def __init__(self, receive: Receive, most: int, seconds: float) -> None:
        self._receive, self._most, self._seconds = receive, most, seconds
        self._size, self._is_complete = 0, False
        self._deadline: float | None = None
        self._error: ApiError | None = None

    async def receive(self) -> Message:
        """Returns the next part."""
        if self._is_complete:
            return await self._receive()  # the only message that still comes: the client has hung up
        now = asyncio.get_running_loop().time()
        self._deadline = now + self._seconds if self._deadline is None else self._deadline
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - now))
        except TimeoutError:
            self._error = ApiError(408, f"the request did not arrive within {self._seconds:g} s")
            return {"type": "http.disconnect"}
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            self._error = ApiError(413, f"a request has at most {self._most} bytes", code="too_large")
            return {"type": "http.disconnect"}
        self._is_complete = not message.get("more_body", False)
        return message

    def instead(self, send: Send) -> Send:
        """Returns a function that sends the application's answer, or the refusal in its place."""

        async def send_or_refuse(message: Message) -> None:
            if self._error is None:
                await send(message)
            elif message["type"] == "http.response.start":
                await _refuse(send, self._error)

        return send_or_refuse


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.as_json()).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
