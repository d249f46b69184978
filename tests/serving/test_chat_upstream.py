"""Models of another server: passed through byte for byte, or asked many times, against a small real one."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.upstream import Upstream, UpstreamText
from tests.reasoning.misbehaving import HASTY
from tests.serving.text_server import LONG, LoopThread, app_of, client_of, listening, serving, user

#: A reply as nobody would write it: its bytes must come through as they are.
ODD = b'{ "id":"x","choices" :[ {"index":0,"message":{"role":"assistant","content":"caf\xc3\xa9 \\u00e9"},\n'
ODD += b'"finish_reason":"stop"}],"object":"chat.completion","created":1,"model":"m:7b", "extra" : 1.50e0 }'
PACKED = gzip.compress(ODD)  # Once: the header holds the second in which it was packed.
PIECES = [
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\ndata: {"choi',
    b'ces":[]}\r\n\r\n',
    b": quiet\n\n",
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "model": "m:7b:single"}}}]


class Recorder:
    """A server that notes what it is sent and answers as each request asks in ``user``."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.waiting, self.left = threading.Event(), threading.Event()
        self.router = APIRouter()
        self.router.add_api_route("/v1/models", self.models)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            self.router.add_api_route(path, self.answer, methods=["POST"])

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "m:7b"}, {"id": "other"}]}

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        match json.loads(body).get("user"):
            case "odd":
                return Response(ODD, media_type="application/json; charset=utf-8", headers={"x-request-id": "r1"})
            case "packed":
                return Response(PACKED, media_type="application/json", headers={"content-encoding": "gzip"})
            case "stream":
                return StreamingResponse(self.pieces(), media_type="text/event-stream")
            case "busy":
                return JSONResponse({"error": {"message": "busy"}}, status_code=429, headers={"retry-after": "7"})
            case "hold":
                return StreamingResponse(self.hold(), media_type="text/event-stream")
        if b"hold" in body:
            return StreamingResponse(self.hold(), media_type="text/event-stream")
        if b"busy" in body:
            return JSONResponse({"error": {"message": "busy"}}, status_code=400)
        return StreamingResponse(self.sum(), media_type="text/event-stream")

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in PIECES:
            yield piece

    async def sum(self) -> AsyncIterator[bytes]:
        for text in ("the sum", " is", " 4"):
            yield b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode()
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage}
        yield b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(last).encode()

    async def hold(self) -> AsyncIterator[bytes]:
        """Sends a token and then nothing, until the client leaves."""
        try:
            yield PIECES[0][:-10]
            self.waiting.set()
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.fixture(scope="module")
def linked() -> Iterator[SimpleNamespace]:
    """A server before another one, in a loop of its own each."""
    loop, far = LoopThread(), LoopThread()
    recorder = Recorder()
    with listening(app_of(recorder.router), far) as behind:

        async def open_upstream() -> tuple[Upstream, list[UpstreamText]]:
            upstream = Upstream(behind, api_key="sk-upstream")
            limits = TextLimits(max_in_flight=2, keep_alive=0.01)
            return upstream, [UpstreamText(name, upstream, limits) for name in await upstream.models()]

        upstream, texts = loop.run(open_upstream())
        with serving(loop, texts) as address:
            yield SimpleNamespace(
                loop=loop, texts=texts, recorder=recorder, url=address, behind=behind, client=client_of(address)
            )
        for text in texts:
            loop.run(text.close())
        loop.run(upstream.close())
    loop.close()
    far.close()


def body_of(model: str, user_field: str, **more: Any) -> bytes:
    """A body with spaces, escapes and an order that no program would write again."""
    rest = json.dumps({"tools": TOOLS, "messages": user("caf\u00e9"), "n": 3, "wings": 2.50, **more}, indent=3)[1:]
    return f'{{ "user" :"{user_field}",\t"model"  : "{model}" ,{rest}\n'.encode()


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
@pytest.mark.parametrize("kind", ["odd", "packed", "stream", "busy"])
def test_bytes_go_through_as_they_are(linked: SimpleNamespace, path: str, kind: str) -> None:
    body = body_of("m:7b", kind)
    replies = []
    for address in (linked.behind, linked.url):
        headers = {"content-type": "application/json", "accept-encoding": "gzip", "authorization": "Bearer mine"}
        with httpx2.stream(
            "POST", f"{address}/{path}", content=body, headers=headers, trust_env=False, timeout=LONG
        ) as reply:
            replies.append((reply.status_code, b"".join(reply.iter_raw()), reply.headers))
    assert linked.recorder.bodies[-2:] == [body, body]
    (status, direct, before), (status_here, here, after) = replies
    assert (status, direct) == (status_here, here)
    for name in ("content-type", "content-length", "content-encoding", "x-request-id", "retry-after"):
        assert before.get(name) == after.get(name)
    assert after.get("x-accel-buffering") == ("no" if kind == "stream" else None)
    # The key of this server is not shown to the other one, which gets its own.
    assert linked.recorder.headers[-1]["authorization"] == "Bearer sk-upstream"
    linked.loop.until(lambda: linked.texts[0].in_flight == 0)


def test_another_name_is_passed_on_as_the_models_own(linked: SimpleNamespace) -> None:
    httpx2.post(f"{linked.url}/responses", content=body_of("gpt-4o", "odd"), trust_env=False)
    assert linked.recorder.bodies[-1] == body_of("m:7b", "odd")


def test_single_changes_the_name_alone(linked: SimpleNamespace) -> None:
    body = body_of("m:7b:single", "odd")
    reply = httpx2.post(f"{linked.url}/chat/completions", content=body, trust_env=False)
    assert reply.content == ODD
    assert linked.recorder.bodies[-1] == body.replace(b'"model"  : "m:7b:single"', b'"model"  : "m:7b"')
    assert b'"model": "m:7b:single"' in linked.recorder.bodies[-1]  # in the tools, which are not ours


def test_the_official_client_passes_through(linked: SimpleNamespace) -> None:
    reply = linked.client.chat.completions.create(model="m:7b", messages=user("hi"), tools=TOOLS, user="odd")
    assert reply.choices[0].message.content == "café é"
    chunks = linked.client.chat.completions.create(model="m:7b", messages=user("hi"), user="stream", stream=True)
    assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices] == ["a"]
    with pytest.raises(openai.RateLimitError):
        linked.client.chat.completions.create(model="m:7b", messages=user("hi"), user="busy")


def test_a_strategy_asks_the_other_server_many_times(linked: SimpleNamespace) -> None:
    asked = len(linked.recorder.bodies)
    name = "m:7b:self-consistency:num=3,early_stop=false"
    options = {"include_threads": True, "include_usage": True}
    chunks = list(
        linked.client.chat.completions.create(
            model=name, messages=user("2+2=?"), stream=True, stream_options=options, seed=1
        )
    )
    bodies = [json.loads(body) for body in linked.recorder.bodies[asked:]]
    assert [(body["model"], body["messages"]) for body in bodies] == [("m:7b", user("2+2=?"))] * 3
    assert len({body["seed"] for body in bodies}) == 3
    last = chunks[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (21, 9)
    assert (last.partsong["answer"], last.partsong["calls"], last.partsong["tokens_critical"]) == ("4", 3, 3)
    texts = dict.fromkeys([f"sample#{number}" for number in range(3)], "")
    for chunk in chunks:
        if "thread" in (chunk.model_extra or {}).get("partsong", {}):
            texts[chunk.partsong["thread"]] += chunk.partsong["text"]
    assert set(texts.values()) == {"the sum is 4"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "the sum is 4"


def test_a_strategy_refuses_tools_and_passes_on_what_the_server_says(linked: SimpleNamespace) -> None:
    ask = linked.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="pdr reads and writes text alone"):
        ask(model="m:7b:pdr", messages=user("hi"), tools=TOOLS)
    with pytest.raises(openai.BadRequestError, match="busy") as refused:
        ask(model="m:7b:self-consistency", messages=user("busy"))
    assert refused.value.code == "upstream_refused"
    with pytest.raises(openai.NotFoundError, match="m:7b, other"):
        ask(model="m:8b", messages=user("hi"))


@pytest.mark.parametrize("name", ["m:7b", "m:7b:self-consistency:num=2"])
def test_hanging_up_hangs_up_there(linked: SimpleNamespace, name: str) -> None:
    linked.recorder.waiting.clear()
    linked.recorder.left.clear()
    stream = linked.client.chat.completions.create(model=name, messages=user("hold"), user="hold", stream=True)
    assert linked.recorder.waiting.wait(LONG)
    assert not linked.recorder.left.is_set()
    stream.close()
    assert linked.recorder.left.wait(LONG)
    linked.loop.until(lambda: linked.texts[0].in_flight == 0)


def test_too_many_are_refused(linked: SimpleNamespace) -> None:
    ask = linked.client.chat.completions.create
    held = [ask(model=name, messages=user("hold"), user="hold", stream=True) for name in ("m:7b", "m:7b:pdr")]
    for name in ("m:7b", "m:7b:pdr"):
        with pytest.raises(openai.RateLimitError, match="2 requests under way"):
            ask(model=name, messages=user("hi"))
    for stream in held:
        stream.close()
    linked.loop.until(lambda: linked.texts[0].in_flight == 0)


def test_a_server_that_is_away_is_a_bad_gateway() -> None:
    loop = LoopThread()

    async def open_text() -> UpstreamText:
        return UpstreamText("m", Upstream("http://127.0.0.1:9/v1", api_key="sk-upstream", patience=HASTY))

    text = loop.run(open_text())
    with serving(loop, [text]) as address:
        for name in ("m", "m:self-consistency:num=2"):
            with pytest.raises(openai.InternalServerError) as away:
                client_of(address).chat.completions.create(model=name, messages=user("hi"), timeout=LONG)
            assert away.value.status_code == 502
            assert away.value.code in ("upstream_unreachable", "upstream_failed")
            assert "sk-upstream" not in away.value.message
    loop.run(text.upstream.close())
    loop.close()
