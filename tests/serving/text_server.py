"""A server of text models on a free port of loopback, in a thread of the test's process, and clients for it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse

from partsong.errors import PartsongError
from partsong.serving import chat_api, responses_api
from partsong.serving.access.users import OPERATOR
from partsong.serving.answers.response_store import ResponseStore
from partsong.serving.errors import as_api_error
from partsong.serving.served_names import ServedNames
from partsong.serving.texts.events import TextAccepted, TextEvent, TextRequest
from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.served import ServedText
from partsong.serving.texts.upstream import _events

#: Longest wait of a test for anything.
LONG = 60.0


class LoopThread:
    """An event loop in a thread of its own, which runs what a test gives it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG)

    def until(self, condition: Any) -> None:
        """Waits until something holds; the loop goes on meanwhile."""

        async def wait() -> None:
            async with asyncio.timeout(LONG):
                while not condition():
                    await asyncio.sleep(0.005)

        self.run(wait())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LONG)
        self.loop.close()


class EngineText:
    """A real model in the test's own process, for what does not depend on processes: they take seconds to start."""

    ready = True

    def __init__(self, model: str, limits: TextLimits) -> None:
        from partsong.serving.texts.local_thinking import ThinkingTexts  # loads torch, which other tests do not need

        self.name, self.limits = model, limits
        self.in_flight = self.cancelled = 0
        self._opened = ThinkingTexts(model, limits)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        await self._opened.engine.close()

    async def run(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        job = self._opened.prepare(request)
        self.in_flight += 1
        try:
            yield TextAccepted()
            async with aclosing(_events(job, self._opened.engine)) as events:
                async for event in events:
                    yield event
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    def as_json(self) -> dict[str, Any]:
        return {"id": self.name, "kind": "thinking", "strategies": [], "defaults": {}}


@contextmanager
def listening(app: Any, loop: LoopThread, **more: Any) -> Iterator[str]:
    """Serves an application and gives its address, which ends in ``/v1``."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", **more))
    serving = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), loop.loop)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = server.force_exit = True
        serving.result(LONG)
        listener.close()


@contextmanager
def serving(loop: LoopThread, texts: Sequence[ServedText]) -> Iterator[str]:
    """Serves text models that have been started."""
    routes = APIRouter()
    for api in (chat_api, responses_api):
        routes.include_router(api.router)
    state: dict[str, Any] = {
        "models": [],
        "served_names": ServedNames({"gpt-4o": texts[0].name}),
        "responses": ResponseStore(most=4),
    }
    with listening(app_of(routes, texts={text.name: text for text in texts}, **state), loop) as address:
        yield address


def app_of(routes: APIRouter, **state: Any) -> FastAPI:
    """An application with errors as the server writes them."""

    async def let_in(request: Request) -> None:
        request.state.user = OPERATOR  # as the gate notes where there are no keys

    app = FastAPI(dependencies=[Depends(let_in)])
    app.include_router(routes)
    app.state.server = SimpleNamespace(**state)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, PartsongError)
        known = as_api_error(error)
        headers = {} if known.retry_after is None else {"retry-after": f"{known.retry_after:g}"}
        return JSONResponse(known.as_json(), status_code=known.status, headers=headers)

    app.add_exception_handler(PartsongError, refuse)
    return app


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="any", max_retries=0, http_client=httpx2.Client(trust_env=False))


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]
