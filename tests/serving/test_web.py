"""Checks how a server treats connections, on a socket of its own in a thread, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from partsong.serving import web
from partsong.serving.server import Server
from tests.serving.running import running
from tests.serving.text_server import LONG, LoopThread, listening

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Where a server listens that cuts idle connections after a third of a second and holds eight."""
    monkeypatch.setattr(web, "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(web, "_MOST", 8)
    monkeypatch.setattr(web, "_raise_file_limit", lambda most: most)
    settings = web.WebSettings(host="127.0.0.1", port=0)
    serving, listener = web._listening(Server(models=(), folder=tmp_path), settings)
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()
    serving.should_exit = True
    thread.join()


def _is_cut(line: socket.socket) -> bool:
    """Whether the server closes a connection within a few seconds."""
    line.settimeout(5.0)
    with contextlib.suppress(ConnectionError):
        while data := line.recv(1 << 16):
            assert data
    return True


@pytest.mark.parametrize("begins", [b"", HEAD, HEAD + b"\r\n" + HEAD])
def test_a_head_that_does_not_come_is_not_waited_for(address: tuple[str, int], begins: bytes) -> None:
    with socket.create_connection(address) as line:
        line.sendall(begins)
        assert _is_cut(line)


def test_an_answer_does_not_wait_for_its_head_to_be_acknowledged(address: tuple[str, int]) -> None:
    """The system leaves a kept connection 40 ms for that, which no answer has to wait."""
    with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}") as client:
        seconds = []
        for _ in range(20):
            begun = time.perf_counter()
            assert client.get("/health").status_code == 200
            seconds.append(time.perf_counter() - begun)
    assert min(seconds[5:]) < 0.03


def test_a_kept_connection_answers_again(address: tuple[str, int]) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}") as client:
        assert [client.get("/health").status_code for _ in range(5)] == [200] * 5


def test_idle_connections_leave_room_for_a_probe(address: tuple[str, int]) -> None:
    lines = [socket.create_connection(address) for _ in range(40)]
    try:
        assert httpx.get(f"http://127.0.0.1:{address[1]}/health", timeout=5.0).status_code == 200
    finally:
        for line in lines:
            line.close()


class Slow:
    """An application that answers when a test says so, and notes when a client has gone."""

    def __init__(self) -> None:
        self.loop = LoopThread()
        self.may_answer, self.gone = asyncio.Event(), threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        gone, told = (asyncio.ensure_future(each) for each in (receive(), self.may_answer.wait()))
        await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.gone.set()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def slow() -> Iterator[tuple[Slow, int]]:
    app = Slow()
    with listening(app, app.loop, http=web._ImpatientProtocol) as url:
        yield app, int(url.rpartition(":")[2].removesuffix("/v1"))
    app.loop.close()


def test_a_client_that_sends_no_more_gets_its_answer(slow: tuple[Slow, int]) -> None:
    app, port = slow
    with socket.create_connection(("127.0.0.1", port)) as line, line.makefile("rb") as read:
        line.sendall(HEAD + b"\r\n")
        line.shutdown(socket.SHUT_WR)
        assert read.readline() == b"HTTP/1.1 100 Continue\r\n"  # what a client skips tells whether it is there
        app.loop.loop.call_soon_threadsafe(app.may_answer.set)
        rest = read.read()
    assert b"HTTP/1.1 200 OK" in rest
    assert rest.endswith(b"\r\n\r\nok")


def test_a_client_that_hangs_up_is_noticed(slow: tuple[Slow, int]) -> None:
    app, port = slow
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(HEAD + b"\r\n")
    assert app.gone.wait(LONG)


def test_http_1_0_needs_no_host(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as line:
        line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in line.recv(1 << 16)


def test_lines_of_the_log() -> None:
    record = logging.LogRecord("partsong.serving.access", logging.INFO, "", 0, "%s", ("GET /health 200",), None)
    assert web._Lines(as_json=False).format(record).endswith("Z info GET /health 200")
    record.facts = {"method": "GET", "path": "/health", "status": 200}
    line = json.loads(web._Lines(as_json=True).format(record))
    assert (line["level"], line["path"], line["status"]) == ("info", "/health", 200)


@pytest.mark.full
@pytest.mark.slow
def test_a_server_that_is_asked_to_end_finishes_what_runs(tmp_path: Path) -> None:
    with running(tmp_path, "--model", "shapes", "--max-active", "1", "--grace", "60") as server:
        server.wait_ready()
        statuses: dict[str, int] = {}

        def ask(name: str) -> None:
            body = {"prompt": name, "num_inference_steps": 50}
            statuses[name] = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=120).status_code

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("first", "second", "third")]
        for number, thread in enumerate(threads):
            thread.start()
            server.wait(lambda wanted=number + 1: len(server.json("/v1/jobs")["data"]) == wanted)
        server.wait(lambda: any(job["step"] for job in server.json("/v1/jobs")["data"]))
        assert server.stop() == 0
        for thread in threads:
            thread.join()
    assert sorted(statuses.values()) == [200, 503, 503]
    assert not any("Traceback" in line for line in server.lines)
