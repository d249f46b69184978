"""Measures a server as its clients see it: ``python benchmarks/serving/load.py``.

Starts ``partsong serve --model shapes`` on loopback and asks it with the official client. ``--soak`` and ``--kills``
add a long run of two requests at a time, and a run in which ranks and the server itself are killed at random.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import io
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tyro
from PIL import Image

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.serving.server import PROMPT, Server, ServerWatch

ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    nproc: int = 2
    """Ranks, one thread each."""
    repeats: int = 5
    """Rounds; the median counts."""
    together: int = 8
    """Requests at a time."""
    soak: float = 0.0
    """Seconds of two requests at a time, in which memory is watched; 0 leaves it out."""
    keep_hours: float = 24.0
    """Hours for which the server keeps what it made, and what it knows of it."""
    cancels: int = 0
    """How often to cancel a job at a random step; 0 leaves it out."""
    kills: int = 0
    """How often to kill a process under load; 0 leaves it out."""


def main(config: Config) -> None:
    """Measures everything and writes the files."""
    watch, rows = ServerWatch(), []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), config.nproc, ["--keep-hours", str(config.keep_hours)])
        try:
            for measure in (_throughput, _fairness, _first_partial, _cancels, _soak, _kills):
                rows += measure(server, config)
        finally:
            server.end()
    load = watch.report()
    lines = [(row["name"], row["value"], row["bar"]) for row in rows]
    note = (
        f"`shapes` with {config.nproc} ranks of one thread, 28 steps with guidance, asked over loopback by the "
        "official client on the same machine, which takes some of its cores."
    )
    table = markdown_table(("what", "measured", "bar"), lines)
    file_result(config.out, __file__, rows, "The server", note, table, load=load)


def _row(name: str, value: str, bar: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "bar": bar, **more}


def _throughput(server: Server, config: Config) -> list[dict[str, Any]]:
    """Times requests one at a time, all at once, and as one request for as many pictures, in turn."""
    rounds: dict[str, list[Any]] = {"one": [], "all": [], "latencies": [], "single": []}
    server.draw(0)
    for _ in range(config.repeats):
        rounds["one"].append(_timed(lambda: [server.draw(seed) for seed in range(config.together)]))
        with concurrent.futures.ThreadPoolExecutor(config.together) as pool:
            begin = time.perf_counter()
            rounds["latencies"] += pool.map(server.draw, range(config.together))
            rounds["all"].append(time.perf_counter() - begin)
        rounds["single"].append(_timed(lambda: _several(server, config.together)))
    ratio = statistics.median(a / b for a, b in zip(rounds["one"], rounds["all"], strict=True))
    p95 = sorted(rounds["latencies"])[int(0.95 * len(rounds["latencies"]))]
    ideal = statistics.median(rounds["single"])
    return [
        _row("seconds until ready", f"{server.start_seconds:.1f}", ""),
        _row(f"throughput of {config.together} at once over one at a time", f"{ratio:.2f}x", ">= 1.5x", **rounds),
        _row(f"95 of 100 requests, over one request for {config.together} pictures", f"{p95 / ideal:.2f}x", "<= 1.2x"),
    ]


def _several(server: Server, num: int) -> None:
    server.client.images.generate(model="shapes", prompt=PROMPT, n=num)


def _timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _fairness(server: Server, config: Config) -> list[dict[str, Any]]:
    """Lets clients of three sizes send requests repeatedly, and compares their waits with their fair share."""
    sizes = ["64x64"] * 5 + ["96x96", "128x128"]
    alone = {size: min(server.draw(1, size=size) for _ in range(3)) for size in dict.fromkeys(sizes)}
    end, waits = time.perf_counter() + 30.0, []

    def ask(size: str) -> None:
        seed = 0
        while time.perf_counter() < end:
            waits.append((size, server.draw(seed := seed + 1, size=size)))

    with concurrent.futures.ThreadPoolExecutor(len(sizes)) as pool:
        list(pool.map(ask, sizes))
    worst = {
        size: max(seconds / (len(sizes) * alone[size]) for each, seconds in waits if each == size) for size in alone
    }
    told = ", ".join(f"{size} {ratio:.2f}x" for size, ratio in worst.items())
    return [_row("longest wait over the fair share, seven clients of three sizes", told, "<= 2x", waits=waits)]


def _first_partial(server: Server, config: Config) -> list[dict[str, Any]]:
    """Times the first partial picture against the whole request."""
    shares = []
    for seed in range(config.repeats):
        begin, first = time.perf_counter(), None
        stream = server.client.images.generate(
            model="shapes", prompt=PROMPT, stream=True, partial_images=2, extra_body={"seed": seed}
        )
        for event in stream:
            if first is None and event.type.endswith("partial_image"):
                first = time.perf_counter() - begin
        assert first is not None
        shares.append(first / (time.perf_counter() - begin))
    return [_row("first partial picture, of the whole time", f"{statistics.median(shares):.0%}", "<= 40%")]


def _cancels(server: Server, config: Config) -> list[dict[str, Any]]:
    """Cancels jobs at random steps, each time looking at how far they went on, and then compares a picture."""
    if not config.cancels:
        return []
    drawn, later, seconds = random.Random(0), [], []
    for number in range(config.cancels):
        strategy = drawn.choice(["ulysses", "ring", "cfg-parallel", "serial"])
        body = {"kind": "image", "model": "shapes", "prompt": PROMPT, "seed": number, "strategy": strategy}
        name = httpx.post(f"{server.url}/v1/jobs", json={**body, "num_inference_steps": 200}).json()["id"]
        wanted = drawn.randrange(0, 12)
        while (job := httpx.get(f"{server.url}/v1/jobs/{name}").json())["step"] < wanted:
            time.sleep(0.005)
        begin = time.perf_counter()
        ended = httpx.post(f"{server.url}/v1/jobs/{name}/cancel", timeout=60).json()
        seconds.append(time.perf_counter() - begin)
        assert ended["status"] == "cancelled"
        later.append(ended["step"] - job["step"])
    pair = [_picture(server, strategy) for strategy in ("ulysses", "serial")]
    apart = int(np.abs(pair[0] - pair[1]).max())
    value = (
        f"{statistics.median(later):.0f} steps (median, {max(later)} at most) from the last look to the end, "
        f"{1000 * statistics.median(seconds):.0f} ms; the next picture is {apart} of 255 levels from its serial twin"
    )
    return [_row(f"{config.cancels} jobs cancelled at random steps", value, "within a step; equal", later=later)]


def _picture(server: Server, strategy: str) -> Any:
    reply = server.client.images.generate(model="shapes", prompt=PROMPT, extra_body={"seed": 3, "strategy": strategy})
    assert reply.data is not None and reply.data[0].b64_json is not None
    with Image.open(io.BytesIO(base64.b64decode(reply.data[0].b64_json))) as picture:
        return np.asarray(picture.convert("RGB"), dtype=np.int16)


def _soak(server: Server, config: Config) -> list[dict[str, Any]]:
    """Watches the memory of every process through a long run."""
    if not config.soak:
        return []
    end, seeds, done = time.perf_counter() + config.soak, iter(range(10**9)), []

    def ask() -> None:
        while time.perf_counter() < end:
            done.append(server.draw(next(seeds)))

    seen: list[dict[int, tuple[int, int]]] = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        for part in range(1, 10):
            while time.perf_counter() < end - (1 - part / 10) * config.soak:
                time.sleep(1.0)
            seen.append(_memory(server))
        for each in asking:
            each.result()
    seen.append(_memory(server))
    # Memory for a process' first pictures does not count as growth.
    before, after = seen[0], seen[-1]
    grown = [max(after[pid][kind] / before[pid][kind] - 1 for pid in before if pid in after) for kind in (0, 1)]
    name = f"growth of a process in {config.soak:.0f} s with two requests in flight, {len(done)} pictures"
    kept = f"what was made is kept for {config.keep_hours:g} hours"
    return [
        _row(f"{name}, {kept}: resident memory", f"{grown[0]:+.2%} at most", "< 1%", seen=seen),
        # The server that ranks are forked from, and they, share fewer pages the longer they run.
        _row("the same: memory that it shares with no other", f"{grown[1]:+.2%} at most", ""),
    ]


def _memory(server: Server) -> dict[int, tuple[int, int]]:
    """Returns the bytes of each process: resident ones, and those that it shares with no other."""
    infos = {process.pid: process.memory_full_info() for process in server.processes()}
    return {pid: (info.rss, info.uss) for pid, info in infos.items()}


def _kills(server: Server, config: Config) -> list[dict[str, Any]]:
    """Kills ranks and the server at random under load, and counts jobs that were lost, done twice or left open."""
    if not config.kills:
        return []
    drawn, finished, load = random.Random(0), dict[str, Any](), _Load(server)
    for number in range(config.kills):
        time.sleep(drawn.uniform(0.5, 4.0))
        finished |= _completed(server)
        if number % 5 == 4:
            server.end(signal.SIGKILL)
            server.begin()
        elif ranks := server.ranks():
            with contextlib.suppress(psutil.Error):
                drawn.choice(ranks).kill()
    load.end()
    states = _all_ended(server)
    lost = [name for name in load.asked if name not in states]
    again = [name for name, when in finished.items() if states.get(name, ("", None))[1] != when]
    ends = [state for state, _ in states.values()]
    value = (
        f"{len(lost)} of {len(load.asked)} jobs lost, {len(again)} of {len(finished)} finished ones done again; "
        f"{ends.count('completed')} completed, {ends.count('failed')} failed with a named error, "
        f"{load.closed} connections closed, {load.refused} refused"
    )
    return [_row(f"{config.kills} kill -9, one in five of the server itself", value, "none lost, none done twice")]


class _Load:
    """Asks for pictures from two clients until it is ended."""

    def __init__(self, server: Server) -> None:
        self.server, self.asked = server, list[str]()
        self.refused = self.closed = 0
        self._stop = threading.Event()
        self._clients = [threading.Thread(target=self._ask, args=(client,), daemon=True) for client in range(2)]
        for client in self._clients:
            client.start()

    def end(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.join()

    def _ask(self, client: int) -> None:
        seed = 1000 * client
        while not self._stop.wait(0.3):
            seed += 1
            body = {"kind": "image", "model": "shapes", "prompt": PROMPT, "seed": seed, "num_inference_steps": 8}
            try:
                reply = httpx.post(f"{self.server.url}/v1/jobs", json=body, timeout=30)
            except httpx.HTTPError:
                self.closed += 1
                continue
            if reply.status_code == 202:
                self.asked.append(reply.json()["id"])
            else:
                self.refused += 1


def _completed(server: Server) -> dict[str, Any]:
    jobs = httpx.get(f"{server.url}/v1/jobs?status=completed&limit=100").json()["data"]
    return {job["id"]: job["completed_at"] for job in jobs}


def _all_ended(server: Server) -> dict[str, tuple[str, Any]]:
    """Waits until every job has ended, and returns how and when."""
    while True:
        jobs, after = [], ""
        while True:
            page = httpx.get(f"{server.url}/v1/jobs?limit=100{after}").json()
            jobs += page["data"]
            if not page["has_more"]:
                break
            after = f"&after={page['data'][-1]['id']}"
        if all(job["status"] in ENDED for job in jobs):
            assert all(job["error"]["message"] for job in jobs if job["status"] == "failed")
            return {job["id"]: (job["status"], job["completed_at"]) for job in jobs}
        time.sleep(0.5)


if __name__ == "__main__":
    main(tyro.cli(Config))
