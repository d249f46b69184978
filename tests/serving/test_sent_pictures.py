"""Checks which pictures a request may begin with, before any rank is asked, and what a pipeline is given of them."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from diffusers import WanImageToVideoPipeline
from PIL import Image

from partsong.errors import ArgumentError
from partsong.serving.app import build_app
from partsong.serving.jobs import Job
from partsong.serving.messages import JobWork
from partsong.serving.ranks.served_model import _check_picture, call_arguments
from partsong.serving.server import Server
from partsong.serving.services import pictures_of
from tests.pipelines.cases.flux2 import HERE
from tests.serving.taker import Taker, png, service


@pytest.fixture
def server(tmp_path: Path) -> Taker:
    models = [service(name, kind) for kind in ("image", "video") for name in ("one", "several", "none")]
    server = Taker(models=models, folder=tmp_path)
    server.prepare()
    return server


def ask(server: Server, path: str, **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, **more)

    return asyncio.run(main())


def edit(server: Server, model: str, *colours: str, prompt: str = "both") -> httpx.Response:
    files = [("image[]", (f"{colour}.png", png(colour))) for colour in colours]
    return ask(server, "/v1/images/edits", data={"model": model, "prompt": prompt, "stream": "true"}, files=files)


def kept(server: Server) -> list[Path]:
    return list((server.folder / "files").glob("sent_*"))


def colours(server: Server, job: Job) -> list[tuple[int, ...]]:
    return [Image.open(server.file(name)).getpixel((0, 0)) for name in pictures_of(job)]  # type: ignore[misc]


def test_several_pictures_go_to_a_model_that_takes_several(server: Taker) -> None:
    reply = edit(server, "several", "red", "blue", "lime")
    assert (reply.status_code, reply.headers["x-accel-buffering"]) == (200, "no")
    (job,) = server.jobs.values()
    assert colours(server, job) == [(255, 0, 0), (0, 0, 255), (0, 255, 0)]


@pytest.mark.parametrize(
    ("model", "sent", "code"),
    [("one", ["red", "blue"], "one_picture"), ("none", ["red"], "no_picture"), ("one", ["red"] * 18, None)],
)
def test_pictures_that_a_model_does_not_take_are_refused(
    server: Taker, model: str, sent: list[str], code: str | None
) -> None:
    reply = edit(server, model, *sent)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)
    assert not kept(server)


def test_pictures_of_a_refused_job_are_removed(server: Taker) -> None:
    assert edit(server, "several", "red", "blue", prompt="fail").status_code == 400
    files = {"input_reference": ("a.png", png("red"))}
    assert ask(server, "/v1/videos", data={"model": "one", "prompt": "fail"}, files=files).status_code == 400
    assert not kept(server)


def test_a_video_begins_with_a_picture(server: Taker) -> None:
    form = {"data": {"model": "one", "prompt": "go"}, "files": {"input_reference": ("a.png", png("red"))}}
    url = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    body = {"model": "one", "prompt": "go", "input_reference": {"image_url": url}}
    first, second = ask(server, "/v1/videos", **form).json()["id"], ask(server, "/v1/videos", json=body).json()["id"]
    assert [colours(server, server.jobs[name])[0] for name in (first, second)] == [(255, 0, 0), (0, 0, 255)]
    again = ask(server, f"/v1/videos/{first}/remix", json={"prompt": "stop"}).json()["id"]
    assert colours(server, server.jobs[again]) == [(255, 0, 0)]
    # Each job has a file of its own, since it is removed with its job.
    assert len(kept(server)) == 3


def _url(colour: str) -> str:
    return "data:image/png;base64," + base64.b64encode(png(colour)).decode()


def test_a_job_begins_with_pictures_that_its_body_holds(server: Taker) -> None:
    body = {"kind": "image", "model": "several", "prompt": "both", "pictures": [_url("red"), _url("blue")]}
    name = ask(server, "/v1/jobs", json=body).json()["id"]
    assert colours(server, server.jobs[name]) == [(255, 0, 0), (0, 0, 255)]
    for changed, words in [
        ({"model": "none"}, "text alone"),
        ({"model": "one"}, "begins with one picture, and 2 were sent"),
        ({"pictures": ["https://elsewhere/a.png"]}, "nothing is fetched"),
        ({"prompt": "fail"}, "refused by the ranks"),
    ]:
        reply = ask(server, "/v1/jobs", json={**body, **changed})
        assert (reply.status_code, words in reply.json()["error"]["message"]) == (400, True), reply.text
    assert len(kept(server)) == 2


def test_a_chat_asks_for_pictures(server: Taker) -> None:
    parts = [{"type": "text", "text": "both"}]
    parts += [{"type": "image_url", "image_url": {"url": _url(colour)}} for colour in ("red", "blue")]  # type: ignore[dict-item]
    body = {"model": "several", "messages": [{"role": "user", "content": parts}], "n": 2, "max_tokens": 9}
    reply = ask(server, "/v1/chat/completions", json={**body, "width": 96, "height": 64}).json()
    (choice,) = reply["choices"]
    assert [part["type"] for part in choice["message"]["content"]] == ["image_url"] * 2
    (job,) = server.jobs.values()
    assert (job.request["prompt"], job.request["width"], job.request["n"]) == ("both", 96, 2)
    assert colours(server, job) == [(255, 0, 0), (0, 0, 255)]
    streamed = ask(server, "/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    chunk = json.loads(streamed[0].removeprefix("data: "))
    assert chunk["choices"][0]["delta"]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert streamed[1] == "data: [DONE]"
    for changed, words in [
        ({"messages": []}, "the last of messages is the prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "not 'input_audio'"),
        ({"model": "none"}, "text alone"),
        ({"logprobs": True}, "logprobs is not known here"),
    ]:
        refused = ask(server, "/v1/chat/completions", json={**body, **changed})
        assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text
    videos = service("film", "video")
    server.models = [*server.models, videos]
    assert "ask /v1/videos" in ask(server, "/v1/chat/completions", json={**body, "model": "film"}).text


@pytest.mark.parametrize(
    ("model", "reference", "words"),
    [
        ("none", {"image_url": "data:image/png;base64,"}, "text alone"),
        ("one", {"image_url": "https://elsewhere/a.png"}, "nothing is fetched"),
        ("one", {"file_id": "file_1"}, "nothing is fetched"),
        ("one", {"image_url": "data:image/png;base64,?"}, "base64"),
        ("one", {"image_url": "data:image/png;base64,AAAA"}, "no picture that can be read"),
    ],
)
def test_a_reference_that_cannot_be_used_is_refused(server: Taker, model: str, reference: Any, words: str) -> None:
    reply = ask(server, "/v1/videos", json={"model": model, "prompt": "go", "input_reference": reference})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input_reference")
    assert words in error["message"]


def test_text_alone_is_refused_where_the_pipeline_demands_a_picture() -> None:
    model: Any = SimpleNamespace(pipe=object.__new__(WanImageToVideoPipeline), makes_videos=True)
    work = JobWork(id="a", prompt="go", arguments={}, out=(Path("a.mp4"),))
    with pytest.raises(ArgumentError, match="input_reference of /v1/videos"):
        _check_picture(model, work)
    _check_picture(model, replace(work, pictures=(b"",)))


def test_a_pipeline_is_given_all_pictures() -> None:
    case = next(case for case in HERE if case.name == "Flux2KleinPipeline")
    pipe = case.make()

    def draw(*names: str) -> Any:
        sent = tuple(png(name, 96) for name in names)
        work = JobWork(id="a", prompt="", arguments={}, out=(Path("a.png"),), pictures=sent)
        arguments = call_arguments(SimpleNamespace(pipe=pipe, makes_videos=False), work)  # type: ignore[arg-type]
        return case.run(pipe, image=arguments["image"])[0]

    both = draw("red", "blue")
    expected = case.run(pipe, image=[Image.new("RGB", (96, 96), name) for name in ("red", "blue")])[0]
    assert both.equal(expected)
    assert not both.equal(draw("red"))
