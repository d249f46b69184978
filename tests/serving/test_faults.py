"""Kills ranks and servers at work, and sends what no client should: nothing may be lost, or left hanging."""

from __future__ import annotations

import concurrent.futures
import random
import re
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest

from tests.serving.running import RunningServer, pixels, running

PROMPT = "a red circle left of a blue square"


#: As many jobs take turns at the living server, and so many may wait.
ACTIVE, WAITING = 4, 8


def _post(server: RunningServer, seed: int, steps: int = 200, **more: Any) -> str:
    body = {"kind": "image", "model": "shapes", "prompt": PROMPT, "seed": seed, "num_inference_steps": steps, **more}
    reply = httpx.post(f"{server.url}/v1/jobs", json=body)
    assert reply.status_code == 202, reply.text
    return reply.json()["id"]


def _end(server: RunningServer, name: str, seconds: float = 120.0) -> Any:
    ended = ("completed", "failed", "cancelled")
    server.wait(lambda: server.json(f"/v1/jobs/{name}")["status"] in ended, seconds)
    return server.json(f"/v1/jobs/{name}")


def _restarts(server: RunningServer) -> float:
    found = re.search(r'partsong_restarts_total{model="shapes"} ([\d.]+)', httpx.get(f"{server.url}/metrics").text)
    return 0.0 if found is None else float(found.group(1))


def _seconds(server: RunningServer) -> dict[psutil.Process, float]:
    return {rank: sum(rank.cpu_times()[:2]) for rank in server.ranks()}


@pytest.mark.slow
def test_jobs_of_a_killed_rank_begin_anew_and_the_queue_goes_on(server: RunningServer) -> None:
    before, spent = _restarts(server), _seconds(server)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:

        def ask(seed: int, steps: int) -> concurrent.futures.Future[Any]:
            body = {"num_inference_steps": steps, "seed": seed}
            return pool.submit(server.client().images.generate, model="shapes", prompt=PROMPT, extra_body=body)

        at_work = ask(20, 40)
        server.wait(lambda: bool(server.json("/v1/jobs?status=in_progress")["data"]))
        begun = [_post(server, seed) for seed in range(1, ACTIVE)]
        server.wait(lambda: all(server.json(f"/v1/jobs/{name}")["step"] > 0 for name in begun))
        third = _post(server, 3, steps=3)
        waits = ask(4, 200)
        server.wait(lambda: server.json("/v1/jobs?status=queued")["data"][0]["seed"] == 4)
        # Of all ranks, those of the other models do nothing.
        max(spent, key=lambda rank: sum(rank.cpu_times()[:2]) - spent[rank]).kill()
        server.wait(lambda: _restarts(server) > before)
        lost = [server.json(f"/v1/jobs/{name}") for name in begun]
        assert all("after the ranks that made it ended" in job["note"] for job in lost)
        for name in begun:
            assert httpx.delete(f"{server.url}/v1/jobs/{name}", timeout=60).json()["status"] == "cancelled"
        assert len(at_work.result().data) == 1  # its client hears nothing of all this
        assert _end(server, third)["status"] == "completed"
        waiting = next(job for job in server.json("/v1/jobs")["data"] if job["seed"] == 4)
        httpx.post(f"{server.url}/v1/jobs/{waiting['id']}/cancel", timeout=60)
        with pytest.raises(openai.ConflictError, match="cancelled") as cancelled:
            waits.result()
        assert cancelled.value.response.headers["x-should-retry"] == "false"
    assert _restarts(server) == before + 1


@pytest.mark.full
def test_a_job_that_was_cancelled_as_its_ranks_died_is_not_made(server: RunningServer) -> None:
    begun = [_post(server, seed) for seed in range(ACTIVE)]
    third = _post(server, 3)
    server.wait(lambda: all(server.json(f"/v1/jobs/{name}")["step"] > 0 for name in begun))
    ranks = server.ranks()
    for rank in ranks:
        rank.suspend()  # they hear of nothing any more
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        cancelling = pool.submit(httpx.delete, f"{server.url}/v1/jobs/{third}", timeout=60)
        with pytest.raises(concurrent.futures.TimeoutError):
            cancelling.result(0.5)
        for rank in ranks:
            rank.kill()
        assert cancelling.result().json()["status"] == "cancelled"
    for name in begun:
        assert "after the ranks that made it ended" in _job_note(server, name)
        httpx.delete(f"{server.url}/v1/jobs/{name}", timeout=60)


def _job_note(server: RunningServer, name: str) -> str:
    return server.json(f"/v1/jobs/{name}")["note"] or ""


@pytest.mark.full
def test_pictures_that_cannot_be_written_fail_their_jobs_alone(server: RunningServer) -> None:
    *refused, last = [_post(server, seed, steps=20) for seed in (1, 2, 3)]
    server.wait(lambda: server.json(f"/v1/jobs/{refused[-1]}")["step"] > 0)
    for name in refused:  # ranks decode in turn, so each of them meets one
        (server.folder / "files" / f"{name}-0.png").mkdir()  # where the picture would be
    ranks = server.ranks()
    for name in refused:
        assert _end(server, name)["status"] == "failed"
        assert f"{name}-0.png" in server.json(f"/v1/jobs/{name}")["error"]["message"]
    assert _end(server, last)["status"] == "completed"
    assert server.ranks() == ranks


def test_more_jobs_than_may_wait_are_refused_with_a_time(server: RunningServer) -> None:
    names = [_post(server, seed) for seed in range(ACTIVE)]
    server.wait(lambda: all(server.json(f"/v1/jobs/{name}")["status"] == "in_progress" for name in names))
    names += [_post(server, seed) for seed in range(WAITING)]
    assert server.json(f"/v1/jobs/{names[-1]}")["position"] == WAITING
    with pytest.raises(openai.RateLimitError) as raised:
        server.client().images.generate(model="shapes", prompt=PROMPT)
    assert int(raised.value.response.headers["Retry-After"]) >= 1
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: httpx.delete(f"{server.url}/v1/jobs/{name}", timeout=60), names))
    assert {_end(server, name)["status"] for name in names} == {"cancelled"}


@pytest.mark.full
def test_after_cancelled_jobs_the_next_picture_is_its_twin(server: RunningServer) -> None:
    drawn = random.Random(0)
    for seed in range(5):
        name = _post(server, seed, strategy=drawn.choice(["ulysses", "ring", "cfg-parallel"]))
        step = drawn.randrange(0, 6)
        server.wait(lambda: server.json(f"/v1/jobs/{name}")["step"] >= step)  # noqa: B023 - called at once
        httpx.post(f"{server.url}/v1/jobs/{name}/cancel")
    body = {"num_inference_steps": 5, "seed": 8}
    pair = [
        server.client().images.generate(model="shapes", prompt=PROMPT, extra_body={**body, "strategy": strategy})
        for strategy in ("ulysses", "serial")
    ]
    one, other = (pixels(str(reply.data[0].b64_json)) for reply in pair if reply.data)
    assert np.abs(one - other).max() <= 1


@pytest.mark.full
def test_a_killed_server_takes_its_jobs_up_again(tmp_path: Path) -> None:
    with running(tmp_path, "--model", "shapes", "--nproc", "2", "--max-active", "1") as first:
        done = _end(first, _post(first, 1, steps=2))
        name, waiting = _post(first, 2, steps=60), _post(first, 3, steps=2)
        first.wait(lambda: first.json(f"/v1/jobs/{name}")["step"] > 1)
        ranks = first.ranks()
        first.kill()
    with running(tmp_path, "--model", "shapes", "--nproc", "2", "--max-active", "1") as second:
        assert not [rank for rank in ranks if rank.is_running()]
        again = second.json(f"/v1/jobs/{done['id']}")
        assert (again["status"], again["completed_at"]) == ("completed", done["completed_at"])
        assert httpx.get(second.url + done["outputs"][0]["url"]).status_code == 200
        ended = _end(second, name)
        assert ended["status"] == "completed"
        assert "from its first step after the server ended; it began then" in ended["note"]
        assert "it waited for its turn then" in _end(second, waiting)["note"]


def test_what_no_client_should_send_is_answered_or_dropped(server: RunningServer) -> None:
    url = f"{server.url}/v1/images/generations"
    json_type = {"content-type": "application/json"}
    assert httpx.post(url, content=b"{", headers=json_type).status_code == 400
    assert httpx.post(url, content=b"[]", headers=json_type).json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(url, content=b"x" * 60_000_000, headers=json_type).status_code == 413
    edits, form = f"{server.url}/v1/images/edits", {"content-type": "multipart/form-data; boundary=a"}
    assert httpx.post(edits, content=b"--a\r\nnonsense", headers=form).status_code == 400
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["message"] == "GET '/v1/nothing': Not Found"
    assert httpx.get(f"{server.url}/v1/files/x.png").status_code == 404
    host, port = server.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(200)]
    for connection in slow:
        connection.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nX-")
    assert httpx.get(f"{server.url}/health").status_code == 200
    for connection in slow:
        connection.close()


@pytest.mark.full
def test_ranks_of_torchrun_serve_and_end_together(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with running(tmp_path, "--model", "shapes", launcher=torchrun) as server:
        body = {"num_inference_steps": 4, "seed": 1}
        drawn = [
            server.client().images.generate(model="shapes", prompt=PROMPT, extra_body={**body, "strategy": strategy})
            for strategy in ("ulysses", "serial")
        ]
        one, other = (pixels(str(reply.data[0].b64_json)) for reply in drawn if reply.data)
        assert np.abs(one - other).max() <= 1
        assert server.json("/v1/jobs")["data"][1]["ranks"][1]["bytes_sent"] > 0
        workers = psutil.Process(server.pid).children()
        assert len(workers) == 2
        workers[1].kill()
        psutil.wait_procs(workers, timeout=60)
        assert not [worker for worker in workers if worker.is_running()]


@pytest.mark.full
@pytest.mark.full
def test_ranks_of_torchrun_end_when_it_is_killed(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with running(tmp_path, "--model", "shapes", launcher=torchrun) as server:
        workers = psutil.Process(server.pid).children()
        assert len(workers) == 2
        server.kill()
        psutil.wait_procs(workers, timeout=20)
        assert not [worker for worker in workers if worker.is_running()]
