"""Checks what jobs are predicted to hold against tensors that are counted, and what is done about it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from partsong.errors import ArgumentError
from partsong.parallel import Mesh
from partsong.parallel.plan.live_bytes import LiveBytes
from partsong.serving.catalog import picture_model
from partsong.serving.messages import JobMemory, JobWork, Submit
from partsong.serving.ranks.desk import Desk
from partsong.serving.ranks.first_step import first_step
from partsong.serving.ranks.forecast import MemoryForecast, forecast_for
from partsong.serving.ranks.paused_job import PausedJob
from partsong.serving.ranks.served_model import ServedModel
from tests.serving.running import running
from tests.serving.test_replicas import PROMPT, ended, picture, post


def _work(name: str, **more: Any) -> JobWork:
    return JobWork(**{"id": name, "prompt": PROMPT, "arguments": {}, "out": (Path("x-0.png"),), **more})


def _loaded(name: str, mesh: Mesh) -> tuple[ServedModel, MemoryForecast]:
    settings = picture_model(name, nproc=1, strategies=(), loras={}).settings
    model = ServedModel(settings, mesh)
    first = first_step(model)
    assert first.arguments is not None
    forecast = forecast_for(settings, model, mesh, first)
    assert forecast is not None
    return model, forecast


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ServedModel, MemoryForecast]]:
    with Mesh() as mesh:
        yield _loaded("shapes", mesh)


@pytest.mark.parametrize(("num", "side"), [(1, 64), (3, 64), (1, 128), (2, 192)])
def test_a_prediction_is_what_the_tensors_take(served: Any, num: int, side: int) -> None:
    model, forecast = served
    work = _work("a", num=num, arguments={**model.defaults, "height": side, "width": side})
    job = PausedJob(model, work, decodes=False)
    with closing(job):
        job.begin()
        with torch.no_grad(), LiveBytes([*model.pipe.transformer.parameters()]) as live:
            model.denoiser(**job.arguments)
    held = live.peak
    latents = torch.randn(num, model.pipe.vae.config.latent_channels, side // 8, side // 8)
    with torch.no_grad(), LiveBytes([*model.pipe.vae.parameters(), latents]) as live:
        model.pipe.vae.decode(latents)
    predicted = forecast.of(work)
    assert predicted.working == pytest.approx(max(held, live.peak), rel=0.35)
    parts = [part for part in model.pipe.components.values() if isinstance(part, torch.nn.Module)]
    weights = sum(weight.nbytes for part in parts for weight in part.parameters())
    assert predicted.weights == pytest.approx(weights, rel=0.05)


def test_a_video_takes_what_its_tensors_do_and_more_frames_take_more() -> None:
    with Mesh() as mesh:
        model, forecast = _loaded("motion", mesh)
        job = PausedJob(model, _work("a", arguments=dict(model.defaults)), decodes=False)
        weights = [*model.denoiser.parameters(), *model.pipe.vae.parameters()]
        with closing(job):
            job.begin()
            with torch.no_grad(), LiveBytes(weights) as live:
                model.denoiser(**job.arguments)
                model.pipe.vae.decode(job.arguments[model.sample])
        frames = model.defaults["num_frames"]
        one, three = (forecast.of(_work("a", num_frames=num)).working for num in (frames, 3 * frames))
        assert one == pytest.approx(live.peak, rel=0.35)
        assert one < three < 3.3 * one


def test_what_cannot_fit_is_refused_with_what_would(served: Any) -> None:
    _, forecast = served
    one = forecast.of(_work("a"))
    forecast.room = int(one.weights + 2.5 * one.working)
    forecast.check(_work("a", num=2))
    with pytest.raises(ArgumentError, match=r"3 of 64x64 need .* GB on a rank .*, and a rank has .*; ask for n=2$"):
        forecast.check(_work("a", num=3))
    with pytest.raises(ArgumentError, match=r"ask for size (\d+)x(\d+)$") as refused:
        forecast.check(_work("a", arguments={"height": 128, "width": 256}))
    found = re.search(r"size (\d+)x(\d+)", str(refused.value))
    assert found is not None
    width, height = map(int, found.groups())
    assert abs(width - 2 * height) <= 16  # in the ratio that was asked for, in whole tiles of the autoencoder
    forecast.check(_work("a", arguments={"height": height, "width": width}))


def test_jobs_that_do_not_fit_together_take_turns_whole() -> None:
    desk = Desk(lambda names: True, max_rows=8, max_active=8, room=100)
    memory = JobMemory(weights=40, working=35)
    for name in "abc":
        desk.take(Submit(_work(name, memory=memory)))
    desk.take(Submit(_work("small", memory=JobMemory(weights=40, working=20))))
    begun = [work.id for work in desk.orders().begun]
    assert begun == ["a", "small"]  # 40 + 35 + 20
    assert desk.orders().begun == ()
    desk.forget("small")
    assert desk.orders().begun == ()
    desk.forget("a")
    assert [work.id for work in desk.orders().begun] == ["b"]
    desk.take(Submit(_work("large", memory=JobMemory(weights=40, working=500))))
    desk.forget("b")
    assert [work.id for work in desk.orders().begun] == ["c"]
    desk.forget("c")
    assert [work.id for work in desk.orders().begun] == ["large"]  # alone, whatever is predicted


def test_a_large_job_is_not_kept_waiting_by_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partsong.serving.ranks.desk._PATIENCE", -1.0)
    desk = Desk(lambda names: True, max_rows=8, max_active=8, room=100)
    desk.take(Submit(_work("first", memory=JobMemory(working=30))))
    assert len(desk.orders().begun) == 1
    desk.take(Submit(_work("large", memory=JobMemory(working=90))))
    desk.take(Submit(_work("small", memory=JobMemory(working=10))))
    assert desk.orders().begun == ()
    desk.forget("first")
    assert [work.id for work in desk.orders().begun] == ["large", "small"]


@pytest.mark.full
def test_a_server_refuses_what_cannot_fit_and_lets_the_rest_wait(served: Any, tmp_path: Path) -> None:
    _, forecast = served
    one = forecast.of(_work("a", num=2))
    room = (one.weights + 1.5 * one.working) / 1e9
    with running(tmp_path, "--model", "shapes", "--memory", f"{room:.9f}") as server:
        body = {"kind": "image", "model": "shapes", "prompt": PROMPT, "n": 8}
        reply = httpx.post(f"{server.url}/v1/jobs", json=body)
        assert reply.status_code == 400
        assert "8 of 64x64 need" in reply.json()["error"]["message"]
        assert "ask for n=3" in reply.json()["error"]["message"]
        names = [post(server, seed, 40, n=2) for seed in range(3)]
        beside: list[int] = []

        def all_done() -> bool:
            # All in one answer: between two, one job may end and the next begin.
            states = [job["status"] for job in server.json("/v1/jobs?limit=10")["data"] if job["id"] in names]
            beside.append(states.count("in_progress"))
            return states.count("completed") == len(names)

        server.wait(all_done, 180.0)
        assert max(beside) == 1
        jobs = ended(server, names)
        assert all(one["completed_at"] <= other["started_at"] for one, other in itertools.pairwise(jobs))
        drawn = [picture(server, job) for job in jobs]
    with running(tmp_path / "other", "--model", "shapes") as server:
        jobs = ended(server, [post(server, seed, 40, n=2) for seed in range(3)])
        for job, expected in zip(jobs, drawn, strict=True):
            assert np.abs(picture(server, job) - expected).max() <= 1
