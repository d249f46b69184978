"""The nodes for ComfyUI: run against a server on loopback, with a stub in ComfyUI's place."""

from __future__ import annotations

import ast
import asyncio
import io
import sys
import threading
from collections.abc import Callable, Iterator
from email.parser import BytesParser
from email.policy import HTTP
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from PIL import Image

from partsong.knobs import kebab
from partsong.parallel.text_only import TextOnly
from partsong.samplers.registry import BUILT_IN
from partsong.serving.errors import ApiError
from partsong.serving.ranks.call_body import read_call, write_prediction
from tests.integrations.comfy_stub import PACK, Comfy, Interrupted, load_pack
from tests.serving.page_stand_in import StandIn, serve
from tests.tiny_models.weights import noise, randomized

ALLOWED = {"PIL", "numpy", "safetensors", "torch", "comfy", "comfy_api"}


def png(value: int, size: tuple[int, int] = (8, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (value, 0, 255)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Comfy:
    stub = Comfy()
    for name, module in stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return stub


@pytest.fixture
def pack(comfy: Comfy) -> Iterator[ModuleType]:
    module = load_pack()
    yield module
    for name in [name for name in sys.modules if name.startswith(module.__name__)]:
        del sys.modules[name]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn(key="secret")
    with serve(stand_in) as url:
        monkeypatch.setenv("PARTSONG_URL", url)
        monkeypatch.setenv("PARTSONG_API_KEY", "secret")
        yield stand_in


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs a node as ComfyUI does, beside what happens on the server; gives its result or its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - the error is what the test looks at
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def followed(server: StandIn, id: str) -> None:
    """Waits until somebody reads the events of a job."""
    assert server.wait(lambda: bool(server.streams.get(id))), f"nobody follows {id}"


def test_only_what_comfyui_has_is_imported() -> None:
    roots = set()
    for path in PACK.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add((node.module or "").split(".")[0])
    assert roots - set(sys.stdlib_module_names) <= ALLOWED


def test_nodes_describe_themselves(pack: ModuleType) -> None:
    extension = asyncio.run(pack.comfy_entrypoint())
    nodes = asyncio.run(extension.get_node_list())
    schemas = [node.define_schema() for node in nodes]
    assert [schema.node_id for schema in schemas] == [
        *("PartsongImage", "PartsongEdit", "PartsongVideo", "PartsongModel", "PartsongStrategy")
    ]
    for schema in schemas:
        ids = [each.id for each in (*schema.inputs, *schema.outputs)]
        assert len(ids) == len(set(ids)), f"{schema.node_id} uses an id twice"


def test_strategies_are_those_of_the_library(pack: ModuleType) -> None:
    names = set(pack.nodes.NAMES) - {"auto", "serial"}
    assert names == {kebab(row.strategy.__name__) for row in BUILT_IN if not issubclass(row.strategy, TextOnly)}


def test_an_image_is_made_with_progress_and_preview(pack: ModuleType, comfy: Comfy, server: StandIn) -> None:
    node = pack.nodes.PartsongImage
    thread, results = in_background(lambda: node.execute(prompt="a circle", count=2, seed=5, steps=4, strategy="ring"))
    assert server.wait(lambda: bool(server.jobs)), "no job arrived"
    followed(server, "job-0001")
    server.change("job-0001", status="in_progress", step=1, steps=4)
    server.preview("job-0001", png(1))
    while thread.is_alive() and (1.0, 4.0, True) not in comfy.progress:
        thread.join(0.01)  # a slow reader would be told of the latest step only
    server.change("job-0001", step=3)
    server.finish("job-0001", {"a.png": png(0), "b.png": png(255)}, seconds=1.5)
    thread.join(20)
    images, report = results[0].values
    assert images.shape == (2, 6, 8, 3)
    assert images.dtype == torch.float32
    np.testing.assert_allclose(images[:, 0, 0].numpy(), [[0, 0, 1], [1, 0, 1]])
    assert "ulysses" in report or "ring" in report
    body = server.requests[0]
    assert body == {
        **{"kind": "image", "model": "shapes", "prompt": "a circle", "seed": 5, "strategy": "ring"},
        **{"num_inference_steps": 4, "n": 2},
    }
    assert (1.0, 4.0, True) in comfy.progress
    assert [value for value, _, _ in comfy.progress] == sorted(value for value, _, _ in comfy.progress)


def test_stopping_the_run_cancels_the_job(pack: ModuleType, comfy: Comfy, server: StandIn) -> None:
    comfy.stop = lambda: bool(server.streams.get("job-0001"))
    thread, results = in_background(lambda: pack.nodes.PartsongImage.execute(prompt="a circle"))
    thread.join(20)
    assert isinstance(results[0], Interrupted)
    assert server.jobs["job-0001"]["status"] == "cancelled"


def test_a_lost_connection_is_made_again(pack: ModuleType, server: StandIn) -> None:
    thread, results = in_background(lambda: pack.nodes.PartsongImage.execute(prompt="a circle"))
    assert server.wait(lambda: bool(server.jobs)), "no job arrived"
    followed(server, "job-0001")
    first = len(server.streams["job-0001"])
    server.send("job-0001", None)
    assert server.wait(lambda: len(server.streams["job-0001"]) > first), "it did not come back"
    server.finish("job-0001", {"a.png": png(0)})
    thread.join(20)
    assert results[0].values[0].shape == (1, 6, 8, 3)


def test_a_video_is_fetched_whole(pack: ModuleType, server: StandIn) -> None:
    thread, results = in_background(lambda: pack.nodes.PartsongVideo.execute(prompt="it moves", frames=9))
    assert server.wait(lambda: bool(server.jobs)), "no job arrived"
    followed(server, "job-0001")
    server.finish("job-0001", {"v.mp4": b"all of it"}, kind="video")
    thread.join(20)
    kind, file = results[0].values[0]
    assert (kind, file.read()) == ("video", b"all of it")
    assert server.requests[0]["num_frames"] == 9


def test_an_edit_sends_picture_and_mask(pack: ModuleType, comfy: Comfy, server: StandIn) -> None:
    image = torch.zeros(1, 6, 8, 3)
    mask = torch.zeros(1, 6, 8)
    mask[:, :3] = 1
    server.edits = [
        ("image_edit.partial_image", {"partial_image_index": 0}, png(9)),
        ("image_edit.completed", {"partsong": server.add(status="completed", strategy="ring")}, png(255)),
    ]
    output = pack.nodes.PartsongEdit.execute(image=image, prompt="blue", mask=mask, steps=3)
    np.testing.assert_allclose(output.values[0][0, 0, 0].numpy(), [1, 0, 1])
    assert output.values[1].startswith("shapes, strategy ring (exact), seed 7")
    content_type, content = server.forms[0]
    form = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + content)
    parts = {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in form.iter_parts()
    }
    assert (parts["prompt"], parts["num_inference_steps"]) == (b"blue", b"3")
    assert "negative_prompt" not in parts and "kind" not in parts
    sent = np.asarray(Image.open(io.BytesIO(parts["mask"])))
    assert (sent[:3] == [255, 255, 255, 0]).all(), "made anew: white, and transparent"
    assert (sent[3:] == [0, 0, 0, 255]).all(), "kept: black, and opaque"
    assert comfy.progress == [(1.0, 4.0, True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "nobody"}, "no image model 'nobody'; it has: shapes"),
        ({"width": 64}, "width 64 and height 0: give both"),
    ],
    ids=["model", "size"],
)
def test_what_cannot_be_made_is_a_sentence(
    pack: ModuleType, server: StandIn, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(pack.client.ServerError, match=message):
        pack.nodes.PartsongImage.execute(prompt="a circle", **arguments)
    assert not server.jobs


def test_the_servers_sentence_comes_through(pack: ModuleType, server: StandIn) -> None:
    server.refuse["POST /v1/jobs"] = ApiError(429, "64 jobs wait for shapes already; try again later")
    with pytest.raises(pack.client.ServerError, match="64 jobs wait"):
        pack.nodes.PartsongImage.execute(prompt="a circle")


def test_a_wrong_key_and_no_server(pack: ModuleType, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTSONG_API_KEY", "wrong")
    with pytest.raises(pack.client.ServerError, match="wants a key"):
        pack.nodes.PartsongImage.execute(prompt="a circle")
    monkeypatch.setenv("PARTSONG_URL", "http://127.0.0.1:9")
    with pytest.raises(pack.client.ServerError, match="no server at http://127.0.0.1:9"):
        pack.nodes.PartsongImage.execute(prompt="a circle")


def test_strategies_are_joined(pack: ModuleType) -> None:
    node = pack.nodes.PartsongStrategy
    first = node.execute("cfg-parallel").values[0]
    assert node.execute("displaced-patch", " warmup_steps=4 ", first).values == (
        "cfg-parallel+displaced-patch:warmup_steps=4",
    )
    for arguments in [("auto", "a=1"), ("serial", "", "ring"), ("ring", "", "auto")]:
        with pytest.raises(pack.client.ServerError):
            node.execute(*arguments)


def test_the_key_goes_nowhere_else(pack: ModuleType, server: StandIn) -> None:
    server.add(status="completed", outputs=[{"url": "http://elsewhere.example/x.png", "kind": "image"}])
    with pytest.raises(pack.client.ServerError, match="elsewhere"):
        pack.client.ServerClient().fetch(server.jobs["job-0001"]["outputs"][0]["url"])


class Here:
    """Stands in for a server: makes the calls of a session with a module of this process.

    Attributes:
        sessions: how many were opened.
        sent: names of the arguments of each call that were sent.
        forgets: whether the session has ended.
    """

    def __init__(self, module: Any, pack: ModuleType) -> None:
        self.module, self.pack = module, pack
        self.sessions, self.sent, self.forgets = 0, list[list[str]](), False
        self._last: dict[str, torch.Tensor] = {}

    @property
    def model(self) -> dict[str, Any]:
        """Describes the model as the server does."""
        facts = {"class": type(self.module).__name__, "config": dict(self.module.config), "dtype": "float64"}
        return {"id": "here", "denoiser": facts}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Opens a session."""
        assert (path, body["model"]) == ("/v1/denoise/sessions", "here")
        self.sessions, self.forgets, self._last = self.sessions + 1, False, {}
        return {"id": f"session{self.sessions}"}

    def send(self, path: str, content: bytes) -> bytes:
        """Makes a call."""
        assert path == f"/v1/denoise/sessions/session{self.sessions}"
        if self.forgets:
            raise self.pack.client.ServerError("there is no session", 404)
        body = read_call(content)
        self.sent.append(sorted(body.named))
        self._last = {**{name: self._last[name] for name in body.unchanged}, **body.named}
        with torch.no_grad():
            return write_prediction(self.module(**self._last, return_dict=False)[0])


def flux(**changed: Any) -> Any:
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
    sizes |= {"joint_attention_dim": 6, "pooled_projection_dim": 5, "in_channels": 16, "axes_dims_rope": (2, 2, 4)}
    return randomized(FluxTransformer2DModel(**{**sizes, "guidance_embeds": True, **changed}))


def test_a_flux_is_called_as_its_own_pipeline_calls_it(pack: ModuleType) -> None:
    module, x, time_ = flux(), noise(2, 4, 6, 8, seed=0), torch.tensor([0.7, 0.7], dtype=torch.float64)
    text, pooled, guidance = noise(2, 3, 6, seed=1), noise(2, 5, seed=2), torch.tensor([3.5], dtype=torch.float64)
    packed = FluxPipeline._pack_latents(x, 2, 4, 6, 8)
    places = FluxPipeline._prepare_latent_image_ids(2, 3, 4, torch.device("cpu"), torch.float64)
    given = {"encoder_hidden_states": text, "pooled_projections": pooled, "timestep": time_, "img_ids": places}
    given |= {"txt_ids": torch.zeros(3, 3), "guidance": guidance.expand(2)}
    with torch.no_grad():
        tokens = module(packed, **given).sample
    expected = FluxPipeline._unpack_latents(tokens, 48, 64, 8)
    here = Here(module, pack)
    remote = pack.denoiser.RemoteDenoiser(here, here.model, None)
    assert (remote.config, remote.in_channels, remote.dtype) == ("Flux", 4, torch.float64)
    drawn = remote(x, time_, context=text, y=pooled, guidance=guidance)
    torch.testing.assert_close(drawn, expected, rtol=1e-12, atol=1e-12)
    odd = remote(noise(1, 4, 5, 7, seed=3), time_[:1], context=text[:1], y=pooled[:1], guidance=guidance)
    assert odd.shape == (1, 4, 5, 7)
    schnell = Here(flux(guidance_embeds=False), pack)
    assert pack.denoiser.RemoteDenoiser(schnell, schnell.model, None).config == "FluxSchnell"


def test_what_has_not_changed_is_sent_once_and_again_to_another_session(pack: ModuleType) -> None:
    here, x = Here(flux(guidance_embeds=False), pack), noise(1, 4, 6, 8, seed=0)
    remote = pack.denoiser.RemoteDenoiser(here, here.model, "ring")
    text, pooled = noise(1, 3, 6, seed=1), noise(1, 5, seed=2)
    times = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    for number, time_ in enumerate(times):
        here.forgets = number == 2
        remote(x + number, time_[None], context=text, y=pooled)
    every = ["encoder_hidden_states", "hidden_states", "img_ids", "pooled_projections", "timestep", "txt_ids"]
    assert (here.sessions, here.sent) == (2, [every, ["hidden_states", "timestep"], every])


def test_a_model_that_comfyui_does_not_sample_is_refused(pack: ModuleType) -> None:
    model = {"id": "pixart", "denoiser": {"class": "PixArtTransformer2DModel", "config": {}, "dtype": "float32"}}
    with pytest.raises(pack.client.ServerError, match="pixart has a PixArtTransformer2DModel"):
        pack.denoiser.RemoteDenoiser(None, model, None)
    rows = {"data": [{**model, "kind": "image"}, {"id": "later", "kind": "video", "denoiser": None}]}
    client: Any = SimpleNamespace(get=lambda path: rows)
    assert pack.denoiser.described(client, "") == rows["data"][0]
    for name, part in [("later", "the ranks of later are starting"), ("other", "no model of pictures or videos")]:
        with pytest.raises(pack.client.ServerError, match=part):
            pack.denoiser.described(client, name)
