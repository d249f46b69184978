"""Kills ranks of a model that has two replicas: each job is made, and made once."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.serving.running import RunningServer, refused, running

PROMPT = "a red circle left of a blue square"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("served")
    with running(folder, "--model", "shapes", "--replicas", "2", "--max-active", "1") as server:
        server.wait(lambda: replicas(server) == 2, 180.0)
        yield server
        assert not [line for line in server.lines if "Traceback" in line], server.lines


def replicas(server: RunningServer, model: str = "shapes") -> int:
    """How many replicas of a model are ready."""
    found = re.search(rf'partsong_replicas_ready{{model="{model}"}} (\d)', httpx.get(f"{server.url}/metrics").text)
    return 0 if found is None else int(found.group(1))


def post(server: RunningServer, seed: int, steps: int, **more: Any) -> str:
    body = {"kind": "image", "model": "shapes", "prompt": PROMPT, "seed": seed, "num_inference_steps": steps, **more}
    reply = httpx.post(f"{server.url}/v1/jobs", json=body)
    assert reply.status_code == 202, reply.text
    return reply.json()["id"]


def ended(server: RunningServer, names: list[str], seconds: float = 180.0) -> list[Any]:
    """Waits until jobs have ended; returns them."""

    def look() -> list[Any]:
        return [server.json(f"/v1/jobs/{name}") for name in names]

    server.wait(lambda: all(job["status"] in ("completed", "failed", "cancelled") for job in look()), seconds)
    return look()


def counted(server: RunningServer, status: str) -> int:
    """How many jobs have ended so."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf'partsong_requests_total{{model="shapes",status="{status}"}} (\d+)', text)
    return 0 if found is None else int(found.group(1))


def picture(server: RunningServer, job: Any) -> NDArray[np.int16]:
    with Image.open(io.BytesIO(httpx.get(server.url + job["outputs"][0]["url"]).content)) as drawn:
        return np.asarray(drawn.convert("RGB"), dtype=np.int16)


@pytest.mark.full
def test_both_groups_are_at_work_at_once(server: RunningServer) -> None:
    names = [post(server, seed, 60) for seed in range(2)]
    server.wait(lambda: all(server.json(f"/v1/jobs/{name}")["status"] == "in_progress" for name in names))
    assert {job["status"] for job in ended(server, names)} == {"completed"}


@pytest.mark.full
def test_a_killed_rank_loses_no_job_and_none_is_made_twice(server: RunningServer) -> None:
    done_before = counted(server, "completed")
    names = [post(server, seed, 40) for seed in range(6)]
    server.wait(lambda: sum(server.json(f"/v1/jobs/{name}")["step"] > 3 for name in names[:2]) == 2)
    server.ranks()[0].kill()
    jobs = ended(server, names)
    assert {job["status"] for job in jobs} == {"completed"}
    anew = [job for job in jobs if job["note"] is not None]
    assert len(anew) == 1  # of those that waited, none had begun
    assert re.search(r"from its first step after the ranks that made it ended: rank 0 was killed", anew[0]["note"])
    assert counted(server, "completed") - done_before == 6
    assert counted(server, "failed") == 0
    # What was begun anew is what it would have been.
    again = ended(server, [post(server, anew[0]["seed"], 40)])[0]
    assert np.array_equal(picture(server, anew[0]), picture(server, again))


@pytest.mark.full
def test_a_job_that_kills_all_its_ranks_fails_in_the_end(server: RunningServer) -> None:
    server.wait(lambda: replicas(server) == 2)
    name = post(server, 1, 200)
    for _ in range(3):
        server.wait(lambda: server.json(f"/v1/jobs/{name}")["step"] > 1)
        for rank in server.ranks():  # whichever has it
            rank.kill()
        server.wait(lambda: server.json(f"/v1/jobs/{name}")["status"] != "in_progress")
    (job,) = ended(server, [name])
    assert job["status"] == "failed"
    assert job["error"]["code"] == "ranks_ended"
    assert "rank 0 was killed by SIGKILL" in job["error"]["message"]


@pytest.mark.full
def test_what_waits_at_a_busy_group_goes_to_one_that_has_come(server: RunningServer) -> None:
    server.wait(lambda: replicas(server) == 2)
    server.ranks()[0].kill()
    server.wait(lambda: replicas(server) == 1)
    names = [post(server, seed, 50) for seed in range(6)]
    server.wait(lambda: replicas(server) == 2)
    # With one job at work in each replica, both have what to do.
    server.wait(lambda: [server.json(f"/v1/jobs/{name}")["status"] for name in names].count("in_progress") == 2)
    assert {job["status"] for job in ended(server, names)} == {"completed"}


@pytest.mark.full
def test_a_cancelled_job_is_dropped_wherever_it_is(server: RunningServer) -> None:
    server.wait(lambda: replicas(server) == 2)
    names = [post(server, seed, 100) for seed in range(4)]
    server.wait(lambda: all(server.json(f"/v1/jobs/{name}")["step"] > 0 for name in names[:2]))
    for name in reversed(names):
        httpx.delete(f"{server.url}/v1/jobs/{name}")
    assert {job["status"] for job in ended(server, names)} == {"cancelled"}
    assert ended(server, [post(server, 9, 2)])[0]["status"] == "completed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "sums", "--replicas", "2"), "models of pictures and videos, and none is served"),
        (("--model", "shapes", "--ray-address", "auto"), "--ray-address goes with --cluster ray"),
        (("--model", "shapes", "--replicas", "0"), "--replicas"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(arguments: tuple[str, ...], message: str, capfd: Any) -> None:
    assert message in refused(capfd, *arguments)
