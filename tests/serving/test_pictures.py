"""Checks pictures and videos of a real server with the official client, against the pipelines themselves."""

from __future__ import annotations

import concurrent.futures
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from partsong import zoo
from partsong.cli.serve_check import check
from partsong.cli.serving_options import ServeCheck
from partsong.seeds import generators
from tests.integrations.comfy_stub import pack_beside
from tests.serving.running import RunningServer, pixels, running

PROMPT = "a red circle left of a blue square"
#: Less than the model's own number of steps; its pictures are not read here.
FEW: dict[str, Any] = {"num_inference_steps": 8}


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def shapes() -> Any:
    pipe = zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _alone(pipe: Any, prompt: str, seed: int, num: int = 1, **more: Any) -> NDArray[np.int16]:
    """Draws pictures with the pipeline itself, in 8 bits."""
    arguments = {**zoo.MODELS["shapes"].defaults, **more}
    with torch.no_grad():
        drawn = pipe([prompt] * num, generator=generators(seed, num), output_type="np", **arguments).images
    return np.round(255 * drawn).astype(np.int16)


def test_a_picture_is_the_one_the_pipeline_draws(client: openai.OpenAI, shapes: Any) -> None:
    reply = client.images.generate(model="shapes", prompt=PROMPT, n=2, extra_body={"seed": 3, **FEW})
    assert reply.size == "64x64"
    assert reply.data is not None
    expected = _alone(shapes, PROMPT, 3, num=2, **FEW)
    for datum, picture in zip(reply.data, expected, strict=True):
        assert datum.b64_json is not None
        assert np.abs(pixels(datum.b64_json) - picture).max() <= 1  # of 255: rounding may fall on either side


def test_whatever_arrives_beside_it_a_picture_stays_the_same(client: openai.OpenAI, shapes: Any) -> None:
    """Asks for more pictures at once than may take turns, of two sizes and two strategies."""
    asked = [
        {"seed": seed, "size": "64x64" if seed % 3 else "96x64", "strategy": ("ulysses", "cfg-parallel")[seed % 2]}
        for seed in range(6)
    ]

    def draw(each: dict[str, Any]) -> NDArray[np.int16]:
        body = {"seed": each["seed"], "strategy": each["strategy"], "num_inference_steps": 4}
        reply = client.images.generate(model="shapes", prompt=PROMPT, size=each["size"], extra_body=body)
        assert reply.data is not None
        assert reply.data[0].b64_json is not None
        return pixels(reply.data[0].b64_json)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        drawn = list(pool.map(draw, asked))
    for each, picture in zip(asked, drawn, strict=True):
        width, height = map(int, each["size"].split("x"))
        expected = _alone(shapes, PROMPT, each["seed"], num_inference_steps=4, width=width, height=height)[0]
        assert picture.shape == expected.shape
        assert np.abs(picture - expected).max() <= 1, each


def test_a_stream_shows_partial_pictures_then_the_whole(client: openai.OpenAI, shapes: Any) -> None:
    # The map from latents to colours learns from what was drawn before.
    steps = {"num_inference_steps": 12}
    given = {"seed": 1, **steps}
    client.images.generate(model="shapes", prompt="a green triangle above a red square", n=2, extra_body=given)
    given = {"seed": 5, **steps}
    stream = client.images.generate(model="shapes", prompt=PROMPT, stream=True, partial_images=2, extra_body=given)
    events = list(stream)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    expected = _alone(shapes, PROMPT, 5, **steps)[0]
    apart = [np.abs(pixels(event.b64_json) - expected).mean() for event in events]
    assert np.abs(pixels(events[-1].b64_json) - expected).max() <= 1
    assert apart[1] < apart[0]  # the later one is nearer to the end
    # A preview is a picture of what is to come, and no noise: nearer to it than the mean colour is.
    assert apart[1] < np.abs(expected - expected.mean(axis=(0, 1))).mean()


def test_an_address_instead_of_text(client: openai.OpenAI) -> None:
    reply = client.images.generate(model="shapes", prompt=PROMPT, response_format="url", extra_body={"seed": 1, **FEW})
    assert reply.data is not None
    fetched = httpx.get(str(reply.data[0].url))
    with Image.open(io.BytesIO(fetched.content)) as picture:
        assert picture.size == (64, 64)
    with pytest.raises(openai.NotFoundError):
        client.get("/files/..%2Fjobs.sqlite", cast_to=object)


def test_other_formats_hold_the_same_picture(client: openai.OpenAI) -> None:
    def draw(kind: Any) -> NDArray[np.int16]:
        body = {"seed": 2, "num_inference_steps": 4}
        reply = client.images.generate(model="shapes", prompt=PROMPT, output_format=kind, extra_body=body)
        assert reply.data is not None
        assert reply.data[0].b64_json is not None
        return pixels(reply.data[0].b64_json)

    assert np.abs(draw("jpeg") - draw("png")).mean() < 4


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"model": "unheard-of"}, openai.NotFoundError, "these are: shapes"),
        ({"prompt": " "}, openai.BadRequestError, "prompt is empty"),
        ({"n": 11}, openai.BadRequestError, "from 1 to 10"),
        ({"size": "10000x10000"}, openai.BadRequestError, "pixels"),
        ({"size": "65x64"}, openai.BadRequestError, "in multiples of 8 pixels; ask for size 64x64"),
        ({"size": "512x512"}, openai.BadRequestError, "the largest of this shape is 256x256"),
        ({"size": "large"}, openai.BadRequestError, "WIDTHxHEIGHT"),
        ({"extra_body": {"strategy": "magic"}}, openai.BadRequestError, "'magic'; this model runs with auto, cfg"),
        ({"extra_body": {"strategy": "auto+ring"}}, openai.BadRequestError, "stand alone"),
        ({"extra_body": {"strategy": "ulysses:degree=3"}}, openai.BadRequestError, "2"),
        ({"extra_body": {"num_inference_steps": 100000}}, openai.BadRequestError, "from 1 to 200"),
        ({"extra_body": {"save_path": "/etc/passwd"}}, openai.BadRequestError, "save_path is not known"),
        ({"extra_body": {"seed": -1}}, openai.BadRequestError, "seed"),
        ({"extra_body": {"lora": "unheard-of"}}, openai.BadRequestError, "no adapter"),
        ({"quality": "best"}, openai.BadRequestError, "quality"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(
    client: openai.OpenAI, given: dict[str, Any], error: type[openai.APIStatusError], says: str
) -> None:
    with pytest.raises(error) as raised:
        client.images.generate(**{"model": "shapes", "prompt": PROMPT, **given})
    assert says in raised.value.message
    assert "Traceback" not in raised.value.message


def test_without_a_seed_every_picture_is_another_and_says_which(server: RunningServer, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "shapes", "prompt": PROMPT, "extra_body": {"num_inference_steps": 2}}
    one, other = (client.images.generate(**asked).model_dump() for _ in range(2))
    seeds = [reply["partsong"]["seed"] for reply in (one, other)]
    assert seeds[0] != seeds[1]
    asked["extra_body"]["seed"] = seeds[0]
    assert client.images.generate(**asked).model_dump()["data"] == one["data"] != other["data"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "video", "n": 2}, "one job makes one video"),
        ({"kind": "image", "num_frames": 3}, "a picture has no num_frames"),
        ({"kind": "image", "fps": 3}, "a picture has no fps"),
        ({"kind": "sound"}, "kind"),
    ],
)
def test_a_job_refuses_what_it_would_ignore(server: RunningServer, given: dict[str, Any], says: str) -> None:
    reply = httpx.post(f"{server.url}/v1/jobs", json={"prompt": PROMPT, **given})
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


def test_a_model_of_text_alone_takes_no_picture(client: openai.OpenAI) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "PNG")
    with pytest.raises(openai.BadRequestError, match="text alone"):
        client.images.edit(model="shapes", prompt=PROMPT, image=("a.png", buffer.getvalue()))


def test_hanging_up_drops_the_job_and_no_other(server: RunningServer, client: openai.OpenAI, shapes: Any) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        beside = pool.submit(client.images.generate, model="shapes", prompt=PROMPT, extra_body={"seed": 9, **FEW})
        body = {"model": "shapes", "prompt": PROMPT, "stream": True, "seed": 77, "num_inference_steps": 200}
        with httpx.stream("POST", f"{server.url}/v1/images/generations", json=body) as reply:
            next(reply.iter_text())
        server.wait(lambda: _job_of_seed(server, 77)["status"] == "cancelled")
        reply_beside = beside.result()
    assert reply_beside.data is not None
    assert reply_beside.data[0].b64_json is not None
    assert np.abs(pixels(reply_beside.data[0].b64_json) - _alone(shapes, PROMPT, 9, **FEW)[0]).max() <= 1
    assert _job_of_seed(server, 77)["step"] < 200


def test_a_job_tells_of_its_steps_and_has_a_twin(server: RunningServer) -> None:
    asked = {"kind": "image", "model": "shapes", "prompt": PROMPT, "seed": 4, "strategy": "ulysses"}
    asked["num_inference_steps"] = 12  # type: ignore[assignment]
    job = httpx.post(f"{server.url}/v1/jobs", json=asked)
    assert job.status_code == 202
    name = job.json()["id"]
    jobs, previews = _events(server, name)
    assert [each["step"] for each in jobs] == sorted(each["step"] for each in jobs)
    assert jobs[-1]["status"] == "completed"
    assert jobs[-1]["class"] == "exact"
    assert all(rank["bytes_sent"] > 0 for rank in jobs[-1]["ranks"])
    assert previews
    twin = httpx.post(f"{server.url}/v1/jobs/{name}/twin").json()
    assert twin["twin_of"] == name
    ended, _ = _events(server, twin["id"])
    assert ended[-1]["status"] == "completed"
    assert ended[-1]["strategy"] == "serial"
    assert all(rank["bytes_sent"] == 0 for rank in ended[-1]["ranks"])
    assert ended[-1]["max_abs_diff"] <= 1 / 255 + 1e-9
    assert server.json(f"/v1/jobs/{name}")["max_abs_diff"] == ended[-1]["max_abs_diff"]
    drawn = httpx.get(f"{server.url}/v1/jobs/{name}/difference")
    assert float(drawn.headers["X-Max-Abs-Diff"]) == pytest.approx(ended[-1]["max_abs_diff"], rel=1e-4)
    with Image.open(io.BytesIO(drawn.content)) as picture:
        assert picture.size == (64, 64)


def test_cancelling_frees_the_ranks_within_a_step(server: RunningServer) -> None:
    asked = {"kind": "image", "model": "shapes", "prompt": PROMPT, "seed": 6, "num_inference_steps": 200}
    name = httpx.post(f"{server.url}/v1/jobs", json=asked).json()["id"]
    server.wait(lambda: server.json(f"/v1/jobs/{name}")["step"] > 0)
    before = server.json(f"/v1/jobs/{name}")["step"]
    ended = httpx.post(f"{server.url}/v1/jobs/{name}/cancel").json()
    assert ended["status"] == "cancelled"
    assert before <= ended["step"] < 200
    assert httpx.get(f"{server.url}/v1/jobs?status=cancelled&limit=1").json()["data"][0]["id"] == name


@pytest.mark.parametrize(
    "strategy", ["displaced-patch:warmup_steps=8", pytest.param("time-parallel:tolerance=0", marks=pytest.mark.full)]
)
def test_strategies_that_keep_something_run_whole(server: RunningServer, strategy: str) -> None:
    # Both equal the twin: the warm-up covers all steps, and tolerance 0 iterates until nothing changes.
    asked = {
        "kind": "image",
        "model": "shapes",
        "prompt": PROMPT,
        "seed": 4,
        "strategy": strategy,
        "num_inference_steps": 8,
    }
    name = httpx.post(f"{server.url}/v1/jobs", json=asked).json()["id"]
    jobs, _ = _events(server, name)
    assert jobs[-1]["status"] == "completed", jobs[-1]["error"]
    twin = httpx.post(f"{server.url}/v1/jobs/{name}/twin").json()
    ended, _ = _events(server, twin["id"])
    assert ended[-1]["psnr_to_serial"] >= 48.0


def test_a_video_is_made_listed_fetched_and_removed(server: RunningServer, client: openai.OpenAI) -> None:
    body = {"seed": 1, "num_frames": 11, "fps": 8, "num_inference_steps": 4}
    video = client.videos.create_and_poll(model="motion", prompt="a red circle moves right", extra_body=body)
    assert video.status == "completed", video.error
    assert video.progress == 100
    data = client.videos.download_content(video.id).read()
    assert data[4:8] == b"ftyp"
    assert next(iter(client.videos.list(limit=1))).id == video.id
    still = client.videos.download_content(video.id, variant="thumbnail").read()
    with Image.open(io.BytesIO(still)) as picture:
        assert picture.size == (32, 32)
    twin = httpx.post(f"{server.url}/v1/jobs/{video.id}/twin").json()
    ended, _ = _events(server, twin["id"])
    assert ended[-1]["psnr_to_serial"] > 30.0  # of compressed files
    with Image.open(io.BytesIO(httpx.get(f"{server.url}/v1/jobs/{video.id}/difference").content)) as drawn:
        assert drawn.size == (32, 32)
    again = client.videos.remix(video.id, prompt="a blue square moves up")
    assert (again.remixed_from_video_id, again.prompt) == (video.id, "a blue square moves up")
    assert server.json(f"/v1/jobs/{again.id}")["seed"] == 1
    assert client.videos.delete(again.id).deleted
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)


def test_the_nodes_for_comfyui_draw_on_it(server: RunningServer, shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pack_beside(monkeypatch, server.url) as pack:
        asked = {"prompt": PROMPT, "seed": 11, "steps": 5, "strategy": "ulysses"}
        images, report = pack.nodes.PartsongImage.execute(**asked, count=2).values
        expected = _alone(shapes, PROMPT, 11, num=2, num_inference_steps=5)
        assert np.abs(np.round(255 * images.numpy()) - expected).max() <= 1
        assert "ulysses" in report
        video, _ = pack.nodes.PartsongVideo.execute(prompt="a red circle moves right", frames=11, steps=2).values
        assert video[1].read()[4:8] == b"ftyp"
        with pytest.raises(pack.client.ServerError, match="multiply to 3"):
            pack.nodes.PartsongImage.execute(**{**asked, "strategy": "ring:degree=3"})


def test_what_is_served_is_listed(server: RunningServer, client: openai.OpenAI) -> None:
    listed = {model.id: model.model_dump() for model in client.models.list()}
    assert listed["shapes"]["kind"] == "image"
    assert {"auto", "ulysses", "serial"} <= set(listed["shapes"]["strategies"])
    assert listed["motion"]["kind"] == "video"
    assert listed["gpt-image-1"] == {**listed["shapes"], "id": "gpt-image-1", "root": "shapes"}
    assert client.models.retrieve("shapes").id == "shapes"
    assert server.json("/ready") == {"ready": True, "missing": []}
    assert server.json("/health") == {"status": "ok"}
    assert {"architecture", "Ulysses"} <= set(server.json("/v1/support")["rows"][0])
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'partsong_requests_total{model="shapes",status="completed"}' in metrics
    assert "partsong_step_seconds" in metrics


def _job_of_seed(server: RunningServer, seed: int) -> Any:
    return next(job for job in server.json("/v1/jobs?limit=100")["data"] if job["seed"] == seed)


def _events(server: RunningServer, name: str) -> tuple[list[Any], list[Any]]:
    """Returns the states and the previews that the stream of a job tells."""
    jobs: list[Any] = []
    previews: list[Any] = []
    with httpx.stream("GET", f"{server.url}/v1/jobs/{name}/events", timeout=120) as reply:
        kind = ""
        for line in reply.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                (jobs if kind == "job" else previews).append(json.loads(line.removeprefix("data: ")))
    return jobs, previews


@pytest.mark.full
def test_a_health_probe_has_every_model_make_something(server: RunningServer) -> None:
    result = check(ServeCheck(url=server.url, make=True))
    checks = {row["check"]: row["answer"] for row in result["checks"]}
    assert (checks["health"], checks["ready"]) == ("ok", "yes")
    assert {name: answer for name, answer in checks.items() if " " in name} == {
        f"{model['kind']} {model['id']}": "made" for model in server.json("/v1/models")["data"]
    }


@pytest.mark.full
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Ends a server politely; its ranks end too, and its folder can be used again at once."""
    with running(tmp_path, "--model", "shapes", "--nproc", "2") as server:
        ranks = server.ranks()
        assert len(ranks) == 2
        assert server.stop() in (0, -15)  # by the signal itself, once all is closed
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != "zombie"]
