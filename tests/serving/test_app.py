"""Checks who is let in, and what is refused before a model is asked, without any ranks."""

from __future__ import annotations

import asyncio
import gzip
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from partsong.serving.access.addresses import public_url
from partsong.serving.access.users import OPERATOR, Users
from partsong.serving.app import build_app, endpoints
from partsong.serving.errors import ApiError
from partsong.serving.fields import SamplingBody
from partsong.serving.limits import Limits
from partsong.serving.server import Server
from tests.serving.running import refused

KEY = "a key that is long enough"
KEYED = Users({KEY: OPERATOR})


def _ask(server: Server, method: str, path: str, base: str = "http://localhost", **more: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(server))
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


def _server(tmp_path: Path, **more: Any) -> Server:
    return Server(models=(), folder=tmp_path, **more)


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_without_the_key_nothing_but_the_page_answers(tmp_path: Path, given: str | None) -> None:
    server = _server(tmp_path, users=KEYED)
    headers = {} if given is None else {"Authorization": given}
    for path in ("/v1/models", "/v1/jobs", "/metrics", "/v1/files/image_1-0.png", "/v1/support"):
        reply = _ask(server, "GET", path, headers=headers)
        assert reply.status_code == 401, path
        assert reply.json()["error"]["type"] == "authentication_error"
    assert _ask(server, "GET", "/health").status_code == 200
    assert _ask(server, "GET", "/").status_code == 200


def test_every_endpoint_is_asked_by_a_test() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    asked = {path: re.findall(r"[/}]([a-z]+)", path)[-1] for paths in endpoints() for path in paths}
    assert not [path for path, word in asked.items() if not re.search(rf"\b{word}\b", tests)]


def test_a_refused_body_is_read_before_the_answer(tmp_path: Path) -> None:
    """Otherwise the answer would be lost with the connection, which the server closes while its client still sends."""
    for given, limits, status in [({}, Limits(), 401), ({"Authorization": f"Bearer {KEY}"}, Limits(body=1000), 413)]:
        taken = list[int]()

        async def pieces(taken: list[int] = taken) -> Any:
            for number in range(20):
                taken.append(number)
                yield b"x" * 100

        server = _server(tmp_path / str(status), users=KEYED, limits=limits)
        reply = _ask(server, "POST", "/v1/images/generations", content=pieces(), headers=given)
        assert (reply.status_code, len(taken)) == (status, 20)
        assert reply.headers["content-length"] == str(len(reply.content))


def test_with_the_key_it_answers(tmp_path: Path) -> None:
    reply = _ask(_server(tmp_path, users=KEYED), "GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    assert reply.json() == {"object": "list", "data": []}


def test_no_other_site_may_read_answers(tmp_path: Path) -> None:
    reply = _ask(_server(tmp_path), "OPTIONS", "/v1/jobs", headers={"Origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("name", ["attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", ""])
def test_without_a_key_only_names_of_this_machine_are_answered(tmp_path: Path, name: str) -> None:
    assert _ask(_server(tmp_path), "GET", "/health", headers={"Host": name}).status_code == 403
    assert _ask(_server(tmp_path, users=KEYED), "GET", "/health", headers={"Host": name}).status_code == 200


@pytest.mark.parametrize("base", ["http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost"])
def test_names_of_this_machine_are_answered(tmp_path: Path, base: str) -> None:
    assert _ask(_server(tmp_path), "GET", "/health", base=base).status_code == 200


def test_large_bodies_are_refused_however_they_come(tmp_path: Path) -> None:
    server = _server(tmp_path, limits=Limits(body=1000))

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    for body in (b"x" * 2000, pieces()):
        reply = _ask(server, "POST", "/v1/images/generations", content=body)
        assert reply.status_code == 413
        assert "at most 1000 bytes" in reply.json()["error"]["message"]


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    server = _server(tmp_path, limits=Limits(body_seconds=0.05))

    async def never() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    reply = _ask(server, "POST", "/v1/images/generations", content=never())
    assert reply.status_code == 408
    assert "did not arrive within 0.05 s" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "shapes", "--host", "0.0.0.0"], "needs a key"),
        (["--model", "shapes", "--lora", "x"], "write NAME=FILE"),
        (["--model", "unheard-of"], "unheard-of"),
        (["--model", "tiles"], "token by token"),
        (["--model", "shapes", "--port", "-1"], "--port"),
        (["--model", "shapes", "--port", "99999"], "from 0 to 65535"),
        (["--model", "sums", "--strategy", "ulysses"], "none is served"),
        (["--model", "sums", "--served-name", "gpt-4o=lists-mdlm"], "lists-mdlm is not served; these are: sums"),
        (["--model", "sums", "--served-name", "gpt-4o"], "write NAME=MODEL"),
        (["--model", "sums", "--root-path", "pictures"], "begin it with a slash"),
    ],
)
def test_a_wrong_command_line_ends_with_one_sentence(arguments: list[str], says: str, capfd: Any) -> None:
    assert says in refused(capfd, *arguments)


def test_a_process_of_a_wrong_command_line_ends_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "partsong", "serve", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "name a model to serve" in done.stderr


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://elsewhere", "Content-Type": "application/json"}, 403),
        ({"Origin": "null", "Content-Type": "application/json"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://localhost", "Content-Type": "application/json; charset=utf-8"}, 404),
        ({"Content-Type": "application/json"}, 404),
    ],
)
def test_a_page_of_another_site_begins_nothing(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    body = b'{"kind": "image", "prompt": "a"}'
    assert _ask(_server(tmp_path), "POST", "/v1/jobs", content=body, headers=headers).status_code == status
    chat = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    reply = _ask(_server(tmp_path), "POST", "/v1/chat/completions", content=chat, headers=headers)
    assert reply.status_code == status


def test_what_clients_send(tmp_path: Path) -> None:
    server = _server(tmp_path)
    body = b'{"kind": "image", "prompt": "a", "size": null, "negative_prompt": null, "metadata": {"a": "b"}}'
    packed = _ask(
        server,
        "POST",
        "/v1/jobs",
        content=gzip.compress(body),
        headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
    )
    assert "no image model is served" in packed.json()["error"]["message"]
    head, whole = (_ask(server, method, "/v1/models") for method in ("HEAD", "GET"))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
    named = _ask(server, "GET", "/health", headers={"X-Request-Id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    assert len(head.headers["x-request-id"]) == 16
    deep = _ask(server, "POST", "/v1/chat/completions", content=b"[" * 100_000)
    assert (deep.status_code, deep.json()["error"]["message"]) == (400, "the body is nested too deeply")


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        (b"{", "the body is not JSON: ", None),
        (b"[1]", "the body is an array; send a JSON object", None),
        (b"3", "the body is a number; send a JSON object", None),
        (b'{"kind": "image"}', "prompt is missing", "prompt"),
        (b'{"kind": "image", "prompt": 3}', "prompt=3: input should be a valid string", "prompt"),
        (b'{"kind": "image", "prompt": "a", "n": "many"}', 'n="many": input should be a valid integer', "n"),
        (
            b'{"kind": "image", "prompt": "a", "guidance_scale": -1}',
            "guidance_scale=-1: input should be",
            "guidance_scale",
        ),
        (b'{"kind": "image", "prompt": "a", "colour": 1}', "colour is not known here; leave it out", "colour"),
    ],
)
def test_a_wrong_body_is_named_in_plain_words(tmp_path: Path, body: bytes, says: str, param: str | None) -> None:
    reply = _ask(_server(tmp_path), "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error["message"].startswith(says), error


def test_a_packed_body_is_bounded_when_it_is_unpacked(tmp_path: Path) -> None:
    server = _server(tmp_path, limits=Limits(body=1000))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    bomb = _ask(server, "POST", "/v1/jobs", content=gzip.compress(b" " * 100_000), headers=headers)
    assert bomb.status_code == 413
    assert _ask(server, "POST", "/v1/jobs", content=b"no gzip", headers=headers).status_code == 400
    other = _ask(server, "POST", "/v1/jobs", content=b"x", headers=headers | {"Content-Encoding": "br"})
    assert other.status_code == 415


def test_errors_repeat_no_megabytes_and_read_plainly() -> None:
    limits = Limits()
    for body, said in (
        ({"prompt": "a", "size": "0x0"}, "has no pixels; write WIDTHxHEIGHT"),
        ({"prompt": "a", "size": "9999x9999"}, "has 99980001 pixels; this server makes 16777216 at most"),
        ({"prompt": "a", "size": "x" * 100_000}, "write WIDTHxHEIGHT"),
        ({"prompt": "a", "negative_prompt": "b" * 100_000}, "negative prompt has 100000 characters"),
    ):
        with pytest.raises(ApiError, match=said) as refused:
            SamplingBody.model_validate(body).asked(limits)
        assert len(str(refused.value)) < 300
    assert SamplingBody.model_validate({"prompt": "half \ud83d", "n": None}).prompt == "half \ufffd"


@pytest.mark.parametrize("path", ["embeddings", "moderations", "audio/speech", "audio/transcriptions", "rerank"])
def test_what_this_server_has_not_got_is_said(tmp_path: Path, path: str) -> None:
    reply = _ask(_server(tmp_path), "POST", f"/v1/{path}", json={"model": "m", "input": "a"})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (404, "not_found_error", "unsupported_endpoint")
    assert "this server has no models" in error["message"]


def test_other_paths_are_not_known_and_not_repeated_whole(tmp_path: Path) -> None:
    for path in ("/v1/wings", "/" + "x" * 50_000):
        error = _ask(_server(tmp_path), "GET", path).json()["error"]
        assert (error["code"], len(error["message"]) < 200) == ("unknown_url", True)
    assert _ask(_server(tmp_path), "PUT", "/v1/models").json()["error"]["code"] == "method_not_allowed"


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/images/generations", {"prompt": "a", LONG: 1}),
        ("/v1/images/generations", {"prompt": "a", "model": LONG}),
        ("/v1/images/generations", {"prompt": "a", "background": LONG}),
        ("/v1/videos", {"prompt": "a", "seconds": LONG}),
        ("/v1/chat/completions", {"model": LONG, "messages": []}),
        ("/v1/responses", {"model": LONG, "input": "a"}),
    ],
)
def test_an_error_repeats_no_megabytes(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    reply = _ask(_server(tmp_path), "POST", path, json=body)
    assert reply.status_code in (400, 404)
    assert len(reply.content) < 3000


def test_below_the_path_of_a_proxy_all_is_as_without(tmp_path: Path) -> None:
    async def ask(path: str, headers: dict[str, str]) -> httpx.Response:
        # As uvicorn passes them on: the path that the proxy took away stands before the rest again.
        transport = httpx.ASGITransport(build_app(_server(tmp_path, users=KEYED)), root_path="/pictures")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(f"/pictures{path}", headers=headers)

    def get(path: str, **headers: str) -> httpx.Response:
        return asyncio.run(ask(path, headers))

    assert get("/health").json() == {"status": "ok"}
    assert get("/v1/models").status_code == 401
    assert get("/v1/embeddings", Authorization=f"Bearer {KEY}").json()["error"]["code"] == "unsupported_endpoint"
    page = get("/").text
    assert '"/pictures/page/page.js"' in page
    assert get("/page/page.js").status_code == 200


@pytest.mark.parametrize(
    ("headers", "url"),
    [
        ({}, "http://10.0.0.1:8000/pictures/f/a.png"),
        ({"x-forwarded-host": "art.example, inner"}, "http://art.example/pictures/f/a.png"),
        (
            {"x-forwarded-host": "art.example:444", "x-forwarded-proto": "https"},
            "https://art.example:444/pictures/f/a.png",
        ),
        ({"x-forwarded-host": "art.example/x?", "x-forwarded-proto": "ftp"}, "http://10.0.0.1:8000/pictures/f/a.png"),
    ],
)
def test_an_address_is_the_one_that_clients_see(headers: dict[str, str], url: str) -> None:
    app = FastAPI()
    app.add_api_route("/f/{name}", lambda name: name, name="file")
    pairs = [(name.encode(), value.encode()) for name, value in ({"host": "10.0.0.1:8000"} | headers).items()]
    scope = {"type": "http", "scheme": "http", "path": "/pictures/", "root_path": "/pictures", "headers": pairs}
    assert public_url(Request({**scope, "app": app, "query_string": b""}), "file", name="a.png") == url


def test_only_the_user_reads_a_servers_folder(tmp_path: Path) -> None:
    server = _server(tmp_path)
    server.open()
    assert (tmp_path / "files").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("jobs.sqlite*"))
