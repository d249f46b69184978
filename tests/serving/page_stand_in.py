"""A server that speaks the routes of `partsong serve` with jobs that a test moves by hand.

The page's states that a real server passes through in a blink, or hardly ever, are held still here: a long queue, a
lost connection, a video that has grown half way, an answer that stops in the middle.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from partsong.serving.errors import ApiError
from partsong.serving.page_api import PAGE_PATHS
from partsong.serving.page_api import router as page_router

FINAL = ("completed", "failed", "cancelled")
SHAPES = {"steps": 8, "guidance": 4.0, "height": 64, "width": 64}
MODELS = [
    {"id": "shapes", "kind": "image", "strategies": ["ulysses", "ring", "displaced-patch"], "defaults": SHAPES},
    {"id": "motion", "kind": "video", "strategies": ["clip-parallel"], "defaults": {**SHAPES, "frames": 16}},
    {"id": "products", "kind": "text", "strategies": ["threshold"], "defaults": {}},
    {"id": "sums", "kind": "thinking", "strategies": ["self-consistency", "best-of-n"], "defaults": {}},
]


class StandIn:
    """Holds jobs, files and streams. Methods without a route's name are for the test and may be called from its thread.

    Attributes:
        models: those that it lists.
        jobs: by id, as the server would write them.
        files: by name, whole; or a queue of pieces that ends with None, for a file that grows.
        requests: bodies of the requests that wanted a job or an answer.
        refuse: raised by the next request of that method and path, once.
        hung_up: is set when a client leaves in the middle of a chat.
        edits: what an edit answers: name, data and picture of each event.
        operator: what an operator sees; None for other users.
        forms: type and content of each form that came with an edit.
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.models = MODELS
        self.jobs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes | asyncio.Queue[bytes | None]] = {}
        self.requests: list[dict[str, Any]] = []
        self.refuse: dict[str, ApiError] = {}
        self.hung_up = threading.Event()
        self.edits: list[tuple[str, dict[str, Any], bytes]] = []
        self.forms: list[tuple[str, bytes]] = []
        self.operator: dict[str, Any] | None = None
        self.news = threading.Condition()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.streams: dict[str, list[asyncio.Queue[str | None]]] = {}
        self.chat: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.app = _app(self)

    def add(self, **fields: Any) -> dict[str, Any]:
        """Makes a job, newest last."""
        number = len(self.jobs) + 1
        job: dict[str, Any] = {
            "id": f"job-{number:04d}",
            "object": "job",
            "kind": "image",
            "model": "shapes",
            "status": "queued",
            "created_at": 1_800_000_000 + number,
            "started_at": None,
            "completed_at": None,
            "expires_at": None,
            "prompt": "a red circle left of a blue square",
            "n": 1,
            "size": "64x64",
            "seed": 7,
            "strategy": "ulysses",
            "advice": None,
            "step": 0,
            "steps": 8,
            "progress": 0,
            "position": 1,
            "outputs": [],
            "ranks": [],
            "class": "exact",
            "twin": None,
            "twin_of": None,
            "max_abs_diff": None,
            "psnr_to_serial": None,
            "error": None,
            "note": None,
        }
        job.update(fields)
        with self.news:
            self.jobs[job["id"]] = job
            self.news.notify_all()
        return job

    def change(self, id: str, **fields: Any) -> None:
        """Changes a job and tells all who follow it."""
        self.jobs[id].update(fields)
        self.send(id, f"event: job\ndata: {json.dumps(self.jobs[id])}\n\n")
        if self.jobs[id]["status"] in FINAL:
            self.send(id, None)

    def preview(self, id: str, png: bytes, index: int = 0) -> None:
        """Sends an unfinished picture."""
        news = {"b64_json": base64.b64encode(png).decode(), "step": self.jobs[id]["step"], "index": index}
        self.send(id, f"event: preview\ndata: {json.dumps(news)}\n\n")

    def send(self, id: str, text: str | None) -> None:
        """Sends raw text to all who follow a job; None ends their streams."""
        for stream in self.streams.get(id, []):
            assert self.loop is not None
            self.loop.call_soon_threadsafe(stream.put_nowait, text)

    def finish(self, id: str, outputs: dict[str, bytes], kind: str = "image", **fields: Any) -> None:
        """Completes a job with files."""
        self.files.update(outputs)
        started = self.jobs[id]["started_at"] or self.jobs[id]["created_at"]
        ended: dict[str, Any] = {
            "status": "completed",
            "step": self.jobs[id]["steps"],
            "progress": 100,
            "position": 0,
            "started_at": started,
            "completed_at": started + 3.2,
            "outputs": [{"url": f"/v1/files/{name}", "kind": kind} for name in outputs],
        }
        self.change(id, **{**ended, **fields})

    def wait(self, is_so: Callable[[], bool], seconds: float = 20.0) -> bool:
        """Waits until a request has made something so; says whether it came about in time."""
        with self.news:
            return self.news.wait_for(is_so, seconds)

    def say(self, chunk: dict[str, Any] | None) -> None:
        """Sends a chunk of an answer; None ends it."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.chat.put_nowait, chunk)

    def grow(self, name: str, piece: bytes | None) -> None:
        """Appends to a file that grows; None ends it."""
        assert self.loop is not None
        file = self.files.setdefault(name, asyncio.Queue())
        assert isinstance(file, asyncio.Queue)
        self.loop.call_soon_threadsafe(file.put_nowait, piece)

    async def check(self, request: Request) -> None:
        """Raises what the test wants this request to meet."""
        path = request.url.path
        name = f"{request.method} {path}"
        if self.key and path not in PAGE_PATHS and request.headers.get("authorization") != f"Bearer {self.key}":
            raise ApiError(401, "this server wants a key and got another one or none; send it as a Bearer token")
        if (error := self.refuse.pop(name, None)) is not None:
            raise error

    def job(self, id: str) -> dict[str, Any]:
        """Returns a job or raises 404."""
        if id not in self.jobs:
            raise ApiError(404, f"there is no job {id!r}; it may have expired")
        return self.jobs[id]


@contextlib.contextmanager
def serve(stand_in: StandIn, root: str = "") -> Iterator[str]:
    """Runs it in a thread and gives its address. Connections wait in the socket until the thread takes them.

    Below a root it is as a proxy shows it there.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await stand_in.app({**scope, "root_path": root}, receive, send)

    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}{root}"
    finally:
        server.should_exit = server.force_exit = True  # a page may follow a job still
        thread.join(20)
        sock.close()


def _app(stand_in: StandIn) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        stand_in.loop = asyncio.get_running_loop()
        yield

    app = FastAPI(lifespan=lifespan, dependencies=[Depends(stand_in.check)])
    app.include_router(page_router)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        headers = {} if error.retry_after is None else {"Retry-After": str(int(error.retry_after))}
        return JSONResponse(error.as_json(), status_code=error.status, headers=headers)

    _add_jobs(app, stand_in)
    _add_others(app, stand_in)
    return app


def _add_jobs(app: FastAPI, stand_in: StandIn) -> None:
    @app.post("/v1/jobs", status_code=202)
    async def make(request: Request) -> dict[str, Any]:
        body = await request.json()
        stand_in.requests.append(body)
        names = ("kind", "model", "prompt", "n", "size", "seed", "strategy")
        return stand_in.add(**{name: body[name] for name in names if name in body})

    @app.get("/v1/jobs")
    async def listed(limit: int = 20, after: str | None = None) -> dict[str, Any]:
        newest = sorted(stand_in.jobs, reverse=True)
        rest = newest[newest.index(after) + 1 :] if after else newest
        data = [stand_in.jobs[id] for id in rest[:limit]]
        return {"object": "list", "data": data, "has_more": len(rest) > limit}

    @app.get("/v1/jobs/{id}")
    async def one(id: str) -> dict[str, Any]:
        return stand_in.job(id)

    @app.post("/v1/jobs/{id}/cancel")
    async def cancel(id: str) -> dict[str, Any]:
        if stand_in.job(id)["status"] not in FINAL:
            stand_in.change(id, status="cancelled")
        return stand_in.jobs[id]

    @app.post("/v1/jobs/{id}/twin", status_code=202)
    async def twin(id: str) -> dict[str, Any]:
        job = stand_in.job(id)
        same = {name: job[name] for name in ("prompt", "n", "size", "seed", "model", "kind", "steps")}
        made = stand_in.add(strategy="serial", twin_of=id, **same)
        job["twin"] = made["id"]
        return made

    @app.get("/v1/jobs/{id}/difference")
    async def difference(id: str) -> Response:
        content = stand_in.files["difference.png"]
        assert isinstance(content, bytes)
        return Response(
            content, media_type="image/png", headers={"X-Max-Abs-Diff": str(stand_in.job(id)["max_abs_diff"])}
        )

    @app.get("/v1/jobs/{id}/events")
    async def followed(id: str) -> StreamingResponse:
        job = stand_in.job(id)
        stream: asyncio.Queue[str | None] = asyncio.Queue()
        with stand_in.news:
            stand_in.streams.setdefault(id, []).append(stream)
            stand_in.news.notify_all()
        stream.put_nowait(f": a comment\n\nevent: job\ndata: {json.dumps(job)}\n\n")
        if job["status"] in FINAL:
            stream.put_nowait(None)
        return StreamingResponse(_drain(stream), media_type="text/event-stream")


def _add_others(app: FastAPI, stand_in: StandIn) -> None:
    @app.get("/v1/operator")
    async def operator() -> dict[str, Any]:
        if stand_in.operator is None:
            raise ApiError(403, "this is for operators; show the key of one", code="not_operator")
        return stand_in.operator

    @app.post("/v1/operator/{action}", status_code=202)
    async def act(action: str) -> dict[str, Any]:
        stand_in.requests.append({action: True})
        if action == "calibrate" and stand_in.operator is not None:
            stand_in.operator["measuring"] = True
        return {}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": stand_in.models}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        return {"status": "ready"}

    @app.get("/v1/files/{name}")
    async def file(name: str) -> Response:
        content = stand_in.files.get(name)
        if content is None:
            raise ApiError(404, f"there is no file {name!r}")
        media_type = "video/mp4" if name.endswith(".mp4") else "image/png"
        if isinstance(content, bytes):
            return Response(content, media_type=media_type)
        return StreamingResponse(_drain(content), media_type=media_type)

    @app.post("/v1/images/edits")
    async def edit(request: Request) -> Response:
        stand_in.forms.append((request.headers["content-type"], await request.body()))
        events = [
            f"event: {name}\ndata: {json.dumps({'type': name, 'b64_json': base64.b64encode(png).decode(), **data})}\n\n"
            for name, data, png in stand_in.edits
        ]
        return Response("".join(events), media_type="text/event-stream")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        stand_in.requests.append(await request.json())
        return StreamingResponse(_answer(stand_in), media_type="text/event-stream")


async def _drain(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while (piece := await queue.get()) is not None:
        yield piece


async def _answer(stand_in: StandIn) -> AsyncIterator[str]:
    complete = False
    try:
        while (chunk := await stand_in.chat.get()) is not None:
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"
        complete = True
    finally:
        if not complete:
            stand_in.hung_up.set()
