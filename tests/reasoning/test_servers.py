"""Servers as child processes: they come up or say why not, and none outlives the process that started it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from partsong import parent
from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning import EngineError
from partsong.reasoning.remote import Patience, UnreachableError, servers
from partsong.reasoning.remote.servers import (
    LocalServer,
    ServerError,
    command_server,
    llama_server,
    transformers_server,
)
from tests.reasoning.test_openai_engine import ask

#: Answers 200 to everything, with its own number.
SERVE = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(os.getpid()).encode()
        self.send_response(200); self.send_header("content-length", str(len(body))); self.end_headers()
        self.wfile.write(body)
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server_of(code: str, seconds: float = 20.0) -> LocalServer:
    return command_server([sys.executable, "-c", code, "{port}"], "m", seconds=seconds)


def process_of(server: LocalServer) -> int:
    with urllib.request.urlopen(f"{server.base_url}/number") as answer:
        return int(answer.read())


def ended(pid: int, seconds: float = 10.0) -> bool:
    """Waits for the end of a process that is not ours."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def test_a_server_for_the_time_of_a_block() -> None:
    server = server_of(SERVE)
    with server:
        pid = process_of(server)
        assert server.is_up and server.base_url.startswith("http://127.0.0.1:")
        assert server.engine().base_url == server.base_url
        assert "listening" in server.last_words()
        with pytest.raises(ArgumentError, match="is up already"):
            server.start()
    assert ended(pid) and not server.is_up and server.last_words() == ""
    with pytest.raises(ServerError, match="is not up; use it inside its with block"):
        server.engine()
    with server:  # and once more
        assert process_of(server) != pid


def test_a_block_that_fails_leaves_no_server() -> None:
    pids: list[int] = []

    def failing() -> None:
        with server_of(SERVE) as server:
            pids.append(process_of(server))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        failing()
    assert ended(pids[0])


def test_a_server_that_does_not_come_up_says_why() -> None:
    code = "import sys; print('reading the model'); sys.exit('no such tensor: lm_head')"
    with pytest.raises(ServerError, match=r"ended with status 1; its last words:\n(?s:.*)no such tensor") as caught:
        server_of(code).start()
    assert isinstance(caught.value, EngineError) and "reading the model" in str(caught.value)
    # SIGTERM ends it, so nothing is left of it either.
    waits = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with pytest.raises(ServerError, match=r"did not answer within 0.6 s; its last words:\n\d+") as caught:
        server_of(waits, seconds=0.6).start()
    assert ended(int(str(caught.value).split()[-1]))


def test_a_server_that_dies_later_is_an_error_of_the_call() -> None:
    with server_of(SERVE) as server:
        engine = server.engine(patience=Patience(retries=0))
        os.kill(process_of(server), signal.SIGKILL)
        with pytest.raises(UnreachableError, match="is the server up"):
            asyncio.run(engine.generate(ask()))


def test_a_port_that_was_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    free = servers._free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens: the server cannot have it
        ports = iter([taken.getsockname()[1], free()])
        monkeypatch.setattr(servers, "_free_port", lambda: next(ports))
        with server_of(SERVE) as server:
            assert process_of(server)


PARENT = """
import sys
from tests.reasoning.test_servers import SERVE, process_of, server_of
server = server_of(SERVE)
server.start()
print(process_of(server), server._process.pid, flush=True)
sys.stdin.read()
if sys.argv[1] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for processes of others, which only Linux lets one do")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_no_server_outlives_its_parent(end: signal.Signals | None) -> None:
    command = [sys.executable, "-c", PARENT, "raise"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        server, guard = map(int, parent.stdout.readline().split())
        if end is None:
            parent.stdin.close()  # it ends by itself, without stopping its server
        else:
            parent.send_signal(end)
        parent.wait(10)
        assert ended(server) and ended(guard)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux sees to it")
def test_no_server_outlives_its_guard() -> None:
    with server_of(SERVE) as server:
        pid = process_of(server)
        assert server._process is not None
        os.kill(server._process.pid, signal.SIGKILL)
        assert ended(pid)


def test_a_server_that_does_not_want_to_end_is_killed() -> None:
    stubborn = "import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
    command = [sys.executable, "-P", parent.__file__, "0.2"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", stubborn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        pid = int(guard.stdout.readline())
        guard.stdin.close()
        assert guard.wait(10) == -signal.SIGKILL % 256 and ended(pid)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: command_server(["serve"], "m"), "has no {port}"),
        (lambda path: llama_server(path / "none.gguf"), "llama.cpp takes a GGUF file"),
        (lambda path: llama_server(__file__, slots=0), "slots=0"),
        (lambda path: server_of("", seconds=0.0), "seconds=0.0"),
    ],
)
def test_refused(tmp_path: Path, make: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make(tmp_path)  # type: ignore[operator]


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden: Sequence[str] = ("xllamacpp", "fastapi")
    find_spec = servers.importlib.util.find_spec
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))
    with pytest.raises(UnsupportedError, match="xllamacpp is not installed; pip install xllamacpp"):
        llama_server(__file__)
    told = r"fastapi is not installed; pip install 'partsong\[transformers-serve\]'"
    with pytest.raises(UnsupportedError, match=told):
        transformers_server(tmp_path)
