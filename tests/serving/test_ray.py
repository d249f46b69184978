"""Serves on a real Ray of this machine: pictures, videos and edits come over the line, and lost ranks lose no job.

Needs Ray and skips itself where it is not installed (``pip install 'partsong[scale]'``).
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from PIL import Image

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'partsong[scale]'", allow_module_level=True)

from partsong import zoo
from partsong.seeds import generators
from tests.serving.ray_cluster import cluster_of, node_of, rank_processes
from tests.serving.running import RunningServer, pixels, refused, running
from tests.serving.test_replicas import PROMPT, counted, ended, picture, post, replicas

#: A cluster takes half a minute to start, and replicas without it have tests of their own.
needs_cluster = pytest.mark.full


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with cluster_of(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = ("--model", "shapes", "--replicas", "2", "--cluster", "ray", "--max-active", "1")
    with running(tmp_path_factory.mktemp("served"), *arguments) as server:
        server.wait(lambda: replicas(server) == 2, 180.0)
        yield server
        assert not [line for line in server.lines if "Traceback" in line], server.lines


def _alone(prompt: str, seed: int, **more: Any) -> Any:
    pipe = zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    arguments = {**zoo.MODELS["shapes"].defaults, **more}
    with torch.no_grad():
        drawn = pipe([prompt], generator=generators(seed, 1), output_type="np", **arguments).images[0]
    return np.round(255 * drawn).astype(np.int16)


@needs_cluster
def test_a_picture_is_the_one_the_pipeline_draws(server: RunningServer) -> None:
    body = {"seed": 3, "num_inference_steps": 8}
    reply = server.client().images.generate(model="shapes", prompt=PROMPT, extra_body=body)
    assert reply.data is not None
    expected = _alone(PROMPT, 3, num_inference_steps=8)
    assert np.abs(pixels(str(reply.data[0].b64_json)) - expected).max() <= 1


@needs_cluster
def test_a_killed_actor_loses_no_job_and_none_is_made_twice(server: RunningServer) -> None:
    before = counted(server, "completed")
    names = [post(server, seed, 40) for seed in range(5)]
    server.wait(lambda: all(server.json(f"/v1/jobs/{name}")["step"] > 3 for name in names[:2]))
    killed = rank_processes()[0]
    killed.kill()
    jobs = ended(server, names)
    assert {job["status"] for job in jobs} == {"completed"}
    (anew,) = [job for job in jobs if job["note"] is not None]
    assert re.search(rf"rank \d \(process {killed.pid} on [\d.]+\) is gone", anew["note"])
    (again,) = ended(server, [post(server, anew["seed"], 40)])
    assert np.abs(picture(server, anew) - picture(server, again)).max() <= 1
    assert counted(server, "completed") - before == 6
    assert counted(server, "failed") == 0
    server.wait(lambda: replicas(server) == 2)


@needs_cluster
def test_a_file_that_the_server_cannot_write_fails_its_job_alone(server: RunningServer) -> None:
    first, second = post(server, 1, 30), post(server, 2, 30)
    (server.folder / "files" / f"{first}-0.png").mkdir()  # where the picture would be
    jobs = ended(server, [first, second])
    assert [job["status"] for job in jobs] == ["failed", "completed"]
    assert f"{first}-0.png cannot be written" in jobs[0]["error"]["message"]


@needs_cluster
def test_a_server_that_ends_takes_its_ranks_along(cluster: Any, server: RunningServer) -> None:
    server.wait(lambda: replicas(server) == 2)
    ranks = rank_processes()
    assert len(ranks) == 2
    server.stop()
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != "zombie"]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("--ray-address", "127.0.0.1:1"), {}, "no Ray cluster could be reached at address='127.0.0.1:1'"),
        ((), {"RANK": "0", "WORLD_SIZE": "1"}, "torchrun has started them; start it without torchrun"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    arguments: tuple[str, ...], variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in refused(capfd, "--model", "shapes", "--cluster", "ray", *arguments)


@needs_cluster
def test_an_edit_takes_its_picture_along(cluster: Any, tmp_path: Path) -> None:
    from diffusers import StableDiffusionInpaintPipeline

    pipe: Any = StableDiffusionInpaintPipeline(**zoo.load("shapes-unet").components, requires_safety_checker=False)
    pipe.save_pretrained(tmp_path / "edits")
    start, mask = Image.new("RGB", (64, 64), (230, 220, 200)), Image.new("L", (64, 64))
    mask.paste(255, (32, 0, 64, 64))
    arguments = {"image": start, "mask_image": mask, "num_inference_steps": 5, "strength": 0.9}
    with torch.no_grad():
        expected = pipe([PROMPT], generator=generators(7, 1), output_type="np", **arguments).images[0]
    files = []
    for each in (start, mask):
        buffer = io.BytesIO()
        each.save(buffer, "PNG")
        files.append(("a.png", buffer.getvalue()))
    with running(tmp_path / "served", "--model", str(tmp_path / "edits"), "--cluster", "ray", "--nproc", "2") as server:
        reply = server.client().images.edit(
            model="edits",
            prompt=PROMPT,
            image=files[0],
            mask=files[1],
            extra_body={"seed": 7, "num_inference_steps": 5, "strength": 0.9, "strategy": "cfg-parallel"},
        )
        assert reply.data is not None
        assert np.abs(pixels(str(reply.data[0].b64_json)) - np.round(255 * expected)).max() <= 1
        (job,) = server.json("/v1/jobs")["data"]
        assert all(rank["bytes_sent"] > 0 for rank in job["ranks"])


@needs_cluster
def test_nodes_that_join_and_leave_add_and_lose_replicas_and_no_job(tmp_path: Path) -> None:
    with cluster_of(0) as cluster:
        first = cluster.add_node(**node_of(1))
        arguments = ("--model", "motion", "--replicas", "2", "--cluster", "ray", "--max-active", "1")
        with running(tmp_path, *arguments) as server:
            assert replicas(server, "motion") == 1
            body = {"model": "motion", "kind": "video", "prompt": "a red circle moves right", "num_frames": 11}
            names = [
                httpx.post(f"{server.url}/v1/jobs", json={**body, "seed": seed, "num_inference_steps": 20}).json()["id"]
                for seed in range(5)
            ]
            cluster.add_node(**node_of(1))
            server.wait(lambda: replicas(server, "motion") == 2, 120.0)
            working = [name for name in names if server.json(f"/v1/jobs/{name}")["status"] == "in_progress"]
            cluster.remove_node(first, allow_graceful=False)
            jobs = ended(server, names, 240.0)
            assert {job["status"] for job in jobs} == {"completed"}
            assert sum(job["note"] is not None for job in jobs) <= len(working) + 1
            server.wait(lambda: replicas(server, "motion") == 1)
            for job in jobs:
                frames = imageio.imread(httpx.get(server.url + job["outputs"][0]["url"]).content, extension=".mp4")
                assert len(frames) == 11
            again = ended(
                server,
                [httpx.post(f"{server.url}/v1/jobs", json={**body, "seed": 0, "num_inference_steps": 20}).json()["id"]],
            )
            one, other = (httpx.get(server.url + job["outputs"][0]["url"]).content for job in (jobs[0], again[0]))
            assert one == other
