"""Checks calls of a denoiser on living ranks against the same loop in this process, and what ends a session."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from torch import Tensor

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.parallel import launch, mesh_for, parallelize
from partsong.parallel.ranks.mesh import Mesh
from partsong.samplers.registry import parse_strategy
from partsong.serving.messages import Cancel, DenoiseCall, JobWork, Recall, Submit
from partsong.serving.ranks.call_body import read_call
from partsong.serving.ranks.desk import Desk
from tests.integrations.comfy_sampling import euler
from tests.integrations.comfy_stub import pack_beside
from tests.serving.running import RunningServer

PROMPT = "a red circle left of a blue square"
SESSIONS = "/v1/denoise/sessions"
#: Noise levels of a short generation.
LEVELS = torch.linspace(1, 0, 7)

#: Makes a call of the denoiser with some arguments; the second ones are those of the last call.
Call = Callable[[dict[str, Tensor], Sequence[str]], Tensor]


def loop(call: Call) -> Tensor:
    """Draws latents as a sampler of somebody else's does: Euler's steps with guidance, both branches in one batch."""
    pipe = zoo.load("shapes")
    with torch.no_grad():
        cond, uncond, pooled, unpooled = pipe.encode_prompt(PROMPT, None, None)
    given = {"encoder_hidden_states": torch.cat([uncond, cond]), "pooled_projections": torch.cat([unpooled, pooled])}
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
    for step, (level, following) in enumerate(itertools.pairwise(LEVELS)):
        named = {"hidden_states": latents.repeat(2, 1, 1, 1), "timestep": 1000 * level.repeat(2)}
        without, towards = call({**named, **({} if step else given)}, list(given) if step else []).chunk(2)
        latents = latents + (following - level) * (without + 4 * (towards - without))
    return latents


def in_process(strategies: str = "") -> Tensor:
    """Runs the loop on the ranks of this process, under strategies."""
    module, kept = zoo.load("shapes").transformer, dict[str, Tensor]()

    def call(named: dict[str, Tensor], unchanged: Sequence[str]) -> Tensor:
        kept.update(named)
        with torch.no_grad():
            return module(**kept, return_dict=False)[0]

    if not strategies:
        return loop(call)
    chosen = [parse_strategy(name) for name in strategies.split("+")]
    with Mesh(**mesh_for(chosen, 2)) as mesh, parallelize(module, *chosen, mesh=mesh):
        return loop(call)


@contextmanager
def session(server: RunningServer, **fields: Any) -> Iterator[dict[str, Any]]:
    """Opens a session for the length of a block."""
    opened = httpx.post(f"{server.url}{SESSIONS}", json=fields, timeout=60)
    assert opened.status_code == 201, opened.text
    yield opened.json()
    httpx.delete(f"{server.url}{SESSIONS}/{opened.json()['id']}")


def packed(named: dict[str, Tensor], unchanged: Sequence[str] = (), **more: Any) -> bytes:
    """Returns the body of a call."""
    facts = {"unchanged": json.dumps(list(unchanged)), "arguments": json.dumps(more)}
    return safetensors.torch.save({name: tensor.clone() for name, tensor in named.items()}, facts)


def post(server: RunningServer, path: str, body: bytes, **query: str) -> httpx.Response:
    """Makes a call."""
    headers = {"Content-Type": "application/octet-stream"}
    return httpx.post(f"{server.url}{path}", content=body, headers=headers, params=query, timeout=60)


def remote(server: RunningServer, path: str, named: dict[str, Tensor], unchanged: Sequence[str]) -> Tensor:
    """Makes a call and returns the prediction."""
    reply = post(server, path, packed(named, unchanged))
    assert reply.status_code == 200, reply.text
    return safetensors.torch.load(reply.content)["sample"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["serial", "cfg-parallel", pytest.param("ulysses", marks=pytest.mark.full)])
def test_the_latents_of_a_session_are_those_of_the_same_loop_in_process(server: RunningServer, strategy: str) -> None:
    with session(server, model="shapes", strategy=strategy) as opened:
        path = f"{SESSIONS}/{opened['id']}"
        drawn, expected = loop(partial(remote, server, path)), in_process()
        told, shown = server.json(path), server.json("/v1/operator")["sessions"]
    assert torch.dist(drawn, expected, float("inf")) <= 2e-5 * expected.abs().max()  # steps of float32 add up
    assert (told["class"], told["calls"], told["denoiser"]["class"]) == ("exact", 6, "SD3Transformer2DModel")
    assert [(each["id"], each["calls"], each["waits"]) for each in shown] == [(opened["id"], 6, False)]
    assert (sum(rank["bytes_sent"] for rank in told["ranks"]) > 0) == (strategy != "serial")


def test_a_session_knows_its_steps(server: RunningServer) -> None:
    """What displaced patches leave for the next step must be there, and nothing of the generation before."""
    twin = launch(in_process, 2, "displaced-patch:warmup_steps=1")
    with session(server, strategy="displaced-patch:warmup_steps=1") as opened:
        call = partial(remote, server, f"{SESSIONS}/{opened['id']}")
        first, second = loop(call), loop(call)  # the second one begins at a larger timestep
    assert torch.dist(first, twin, float("inf")) <= 2e-5 * twin.abs().max()
    assert torch.equal(first, second)
    assert torch.dist(twin, in_process()) > 1e-3  # it does differ from the serial one


def test_comfyuis_sampler_draws_the_same_latents(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = zoo.load("shapes")
    with torch.no_grad():
        cond, uncond, pooled, unpooled = pipe.encode_prompt(PROMPT, None, None)
    conds = {"c_crossattn": torch.cat([uncond, cond]), "y": torch.cat([unpooled, pooled])}
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
    with pack_beside(monkeypatch, server.url) as pack:
        strategy = pack.nodes.PartsongStrategy.execute("ulysses").values[0]
        model = pack.nodes.PartsongModel.execute("shapes", strategy).values[0]
        drawn = euler(model, latents, LEVELS, conds, cfg=4.0)
        with pytest.raises(pack.client.ServerError, match="cannot be sent a ControlNet"):
            model.model.diffusion_model(latents, LEVELS[:1], cond, y=pooled, control={"input": []})
    expected = in_process()
    assert torch.dist(drawn, expected, float("inf")) <= 2e-5 * expected.abs().max()
    assert torch.equal(drawn, euler(model, latents, LEVELS, conds, cfg=4.0))  # another run of the same model


def test_one_call_needs_no_session_and_keeps_the_type_of_the_latents(server: RunningServer) -> None:
    module = zoo.load("shapes").transformer
    named = {"hidden_states": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([500.0, 20.0])}
    named |= {"encoder_hidden_states": torch.randn(2, 9, 192), "pooled_projections": torch.randn(2, 192)}
    with torch.no_grad():
        expected = module(**named).sample
    reply = post(server, "/v1/denoise", packed(named), model="shapes", strategy="ring")
    assert float(reply.headers["x-partsong-seconds"]) > 0
    drawn = safetensors.torch.load(reply.content)["sample"]
    assert torch.dist(drawn, expected, float("inf")) <= 1e-5 * expected.abs().max()
    double = post(server, "/v1/denoise", packed({**named, "hidden_states": named["hidden_states"].double()}))
    assert safetensors.torch.load(double.content)["sample"].dtype == torch.float64


def test_what_is_no_call_is_refused_and_the_session_goes_on(server: RunningServer) -> None:
    latents, time_ = torch.randn(1, 4, 16, 16), torch.tensor([500.0])
    good = {"hidden_states": latents, "timestep": time_}
    good |= {"encoder_hidden_states": torch.randn(1, 9, 192), "pooled_projections": torch.randn(1, 192)}
    with session(server, strategy="cfg-parallel") as opened:
        path = f"{SESSIONS}/{opened['id']}"
        for body, part in [
            (b"no tensors", "no safetensors file"),
            (packed({**good, "clip": latents}), "takes no 'clip' from a client; it takes hidden_states,"),
            (packed({"timestep": time_}), "send the latents of SD3Transformer2DModel as the tensor 'hidden_states'"),
            (packed({"hidden_states": latents}), "send the 'timestep' of each call"),
            (packed(good, ["skip_layers"]), "'skip_layers' is said to be unchanged, and is no part of"),
            (packed(good, ["timestep"]), "is given too"),
        ]:
            reply = post(server, path, body)
            assert reply.status_code == 400
            assert part in reply.json()["error"]["message"]
        assert post(server, path, packed(good)).status_code == 200
        # What the model itself refuses ends the session, and leaves the ranks.
        bad = post(server, path, packed({**good, "hidden_states": latents[:, :3]}))
        assert (bad.status_code, "SD3Transformer2DModel" in bad.text) == (500, True)
        gone = post(server, path, packed(good))
        assert (gone.status_code, "a call failed" in gone.text) == (404, True)
    with session(server) as opened:
        assert post(server, f"{SESSIONS}/{opened['id']}", packed(good)).status_code == 200


def test_strategies_with_a_loop_and_wrong_names_are_refused(server: RunningServer) -> None:
    for fields, status, part in [
        ({"strategy": "time-parallel"}, 400, "TimeParallel samples with a loop of its own"),
        ({"strategy": "parallel-vae"}, 400, "ParallelVae is not about the denoiser"),
        ({"strategy": "nope"}, 400, "there is no strategy 'nope'"),
        ({"model": "nope"}, 404, "no image model 'nope' is served here"),
        ({"steps": 3}, 400, "steps is not known here"),
        ({"pause": 1e9}, 400, "pause=1000000000.0"),
    ]:
        reply = httpx.post(f"{server.url}{SESSIONS}", json=fields, timeout=60)
        assert (reply.status_code, part in reply.text) == (status, True), reply.text


def test_other_jobs_wait_for_a_session_that_its_client_forgets(server: RunningServer) -> None:
    opened = httpx.post(f"{server.url}{SESSIONS}", json={"pause": 1.0}, timeout=60).json()
    begun = time.monotonic()
    made = httpx.post(
        f"{server.url}/v1/images/generations", json={"prompt": PROMPT, "num_inference_steps": 2}, timeout=60
    )
    assert (made.status_code, time.monotonic() - begun >= 1.0) == (200, True)
    reply = post(server, f"{SESSIONS}/{opened['id']}", b"")
    assert (reply.status_code, "no call came for a while" in reply.text) == (404, True)
    assert httpx.delete(f"{server.url}{SESSIONS}/{opened['id']}").status_code == 404


def work(name: str, pause: float | None = None, user: str = "") -> JobWork:
    return JobWork(id=name, prompt="", arguments={}, out=(Path(name),), pause=pause, user=user)


def desk() -> Desk:
    return Desk(lambda work: not work.is_session, max_rows=4, max_active=4)


def test_a_session_has_the_ranks_from_its_turn_to_its_end() -> None:
    orders = desk()
    for each in (work("before"), work("session", 30.0), work("after")):
        assert orders.take(Submit(each)) is None
    assert [each.id for each in orders.orders().begun] == ["before", "after"]  # jobs of one setting go together
    for name in ("before", "after"):
        orders.forget(name)
    opened = orders.orders()
    assert ([each.id for each in opened.begun], opened.setting) == (["session"], ((), None))
    assert orders.take(Submit(work("late"))) is None
    assert orders.is_idle  # it waits for the client, whoever else waits
    assert orders.take(DenoiseCall(id="session", number=1, body=b"")) is None
    assert not orders.is_idle
    turn = orders.orders()
    assert (turn.call is not None, turn.begun) == (True, ())
    assert orders.take(Cancel("session")) is None
    ended = orders.orders()
    assert (ended.dropped, [each.id for each in ended.begun]) == (("session",), ["late"])
    assert ended.setting == ((), None)  # the model is set anew, which drops what the session has kept
    assert orders.take(DenoiseCall(id="session", number=2, body=b"")) is None
    assert orders.orders().call is None


def test_a_pause_is_counted_from_the_end_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a large model takes longer than its client pauses."""
    now = [100.0]
    monkeypatch.setattr("partsong.serving.ranks.desk.time.monotonic", lambda: now[0])
    orders = desk()
    orders.take(Submit(work("session", 3.0)))
    opened = orders.orders()
    now[0] += 20.0  # to set the model
    orders.charge(opened, 20.0)
    for _ in range(2):
        now[0] += 1.0
        assert orders.orders().dropped == ()
        orders.take(DenoiseCall(id="session", number=1, body=b""))
        turn = orders.orders()
        assert turn.call is not None
        now[0] += 10.0
        orders.charge(turn, 10.0)
    now[0] += 3.5
    assert orders.orders().dropped == ("session",)


def test_a_session_that_waits_can_be_recalled_and_cancelled() -> None:
    orders = desk()
    for name in ("first", "second"):
        orders.take(Submit(work(name, 30.0)))
    orders.orders()
    assert type(orders.take(Recall("second"))).__name__ == "JobReturned"
    orders.take(Submit(work("second", 30.0)))
    assert type(orders.take(Cancel("second"))).__name__ == "JobCancelled"


def test_nested_arguments_have_dots_in_their_names() -> None:
    body = read_call(packed({"added.text": torch.ones(1), "added.time": torch.zeros(2)}, ["x"], scale=2.0))
    assert body.named["added"]["time"].shape == (2,)
    assert (body.named["scale"], body.unchanged) == (2.0, ("x",))
    with pytest.raises(ArgumentError, match="which is given as something else"):
        read_call(packed({"scale.text": torch.ones(1)}, scale=2.0))
