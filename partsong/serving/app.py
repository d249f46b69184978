"""Makes the web application of a server: its routes, who may use them, and what an error looks like."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from partsong import __version__
from partsong.errors import PartsongError
from partsong.serving import chat_api, images_api, jobs_api, operator_api, page_api, responses_api, videos_api
from partsong.serving.access.addresses import path_of
from partsong.serving.access.gate import Gate
from partsong.serving.denoising import api as denoise_api
from partsong.serving.errors import ApiError, as_api_error, invalid, no_answer
from partsong.serving.server import Server

__all__ = ["build_app", "endpoints"]

#: What answers requests, in the order of the documentation's table.
_APIS = (images_api, videos_api, denoise_api, responses_api, chat_api, jobs_api, operator_api, page_api)

_log = logging.getLogger(__name__)

#: What anybody may see without a key: the page and its parts, which hold no data, and whether the server is up.
_OPEN = frozenset({*page_api.PAGE_PATHS, "/health", "/ready"})


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
    app.add_exception_handler(RecursionError, _nested)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Gate, server=server, open_paths=_OPEN)
    return app


def endpoints() -> dict[tuple[str, ...], Callable[..., Any]]:
    """Returns what answers each request by its methods and paths, such as ``GET /health``; pages are left out."""
    paths: dict[Callable[..., Any], list[str]] = {}
    routes = [route for api in _APIS for route in api.router.routes if isinstance(route, APIRoute)]
    for route in (route for route in routes if route.include_in_schema):
        paths.setdefault(route.endpoint, []).extend(f"{method} {route.path}" for method in sorted(route.methods or ()))
    return {tuple(each): answer for answer, each in paths.items()}


def _reply(error: ApiError) -> JSONResponse:
    return JSONResponse(error.as_json(), status_code=error.status, headers=error.headers)


async def _partsong_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PartsongError)
    return _reply(as_api_error(error))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _reply(invalid(error.errors()[0]))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _reply(no_answer(error.status_code, request.method, path_of(request.scope), error.detail))


async def _nested(request: Request, error: Exception) -> Response:
    return _reply(ApiError(400, "the body is nested too deeply", code="invalid_json"))


async def _unexpected(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _reply(ApiError(500, "the server failed on this request; its log says why"))
