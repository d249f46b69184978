"""Puts a server through what happens to it in a month: ``python benchmarks/serving/trials.py``.

Each trial has a server of its own. The full disk is a small file system in memory, which only root can make.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.serving.server import PROMPT, Server, ServerWatch

SHORT = {"kind": "image", "model": "shapes", "prompt": PROMPT, "num_inference_steps": 4}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to try."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    together: int = 200
    """Requests at once."""
    connections: int = 1100
    """Idle connections."""
    good: int = 20
    """Jobs beside one that ends its ranks."""


def main(config: Config) -> None:
    """Runs all trials and writes the files."""
    rows: list[dict[str, Any]] = []
    for trial in (_at_once, _idle_connections, _full_disk, _sigterm, _poison):
        watch = ServerWatch()
        rows += [{**row, **watch.report()} for row in trial(config)]
    lines = [(row["name"], row["value"], row["bar"], f"{row['load_of_others']:.0%}") for row in rows]
    note = (
        "`shapes` with 2 ranks of one thread, pictures of 4 steps; the server, its ranks and all clients share the "
        "cores of one machine."
    )
    table = markdown_table(("trial", "what happened", "bar", "load of others"), lines)
    load = {share: max(row[share] for row in rows) for share in ("load_before", "load_of_others")}
    file_result(config.out, __file__, rows, "Trials of the server", note, table, load=load)


@contextlib.contextmanager
def _served(folder: Path | None = None, more: Sequence[str] = ()) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as other:
        server = Server(folder or Path(other), 2, more)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.end()


def _row(name: str, value: str, bar: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "bar": bar, **more}


def _ask(server: Server, seed: int, until: float = 600.0) -> tuple[int, int]:
    """Asks for a picture, again where the server says when; returns the status and the refusals before it."""
    body = {**{name: SHORT[name] for name in ("model", "prompt", "num_inference_steps")}, "seed": seed}
    end, refusals = time.monotonic() + until, 0
    while True:
        reply = httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=until)
        if reply.status_code not in (429, 503) or time.monotonic() > end:
            return reply.status_code, refusals
        refusals += 1
        time.sleep(float(reply.headers["retry-after"]))


def _at_once(config: Config) -> list[dict[str, Any]]:
    """Sends many requests at once and watches whether the server still says how it is."""
    with (
        _served(more=("--max-waiting", "64")) as server,
        concurrent.futures.ThreadPoolExecutor(config.together) as pool,
    ):
        begin = time.perf_counter()
        asked = [pool.submit(_ask, server, seed) for seed in range(config.together)]
        health = []
        while not all(each.done() for each in asked):
            look = time.perf_counter()
            httpx.get(f"{server.url}/health", timeout=60).raise_for_status()
            health.append(time.perf_counter() - look)
            time.sleep(0.1)
        seconds = time.perf_counter() - begin
        ends = Counter(each.result()[0] for each in asked)
        refusals = sum(each.result()[1] for each in asked)
    value = (
        f"{ends[200]} pictures in {seconds:.0f} s, {refusals} refusals with `Retry-After` on the way; `/health` "
        f"answered in {1000 * statistics.median(health):.0f} ms (median, {1000 * max(health):.0f} ms at most)"
    )
    return [_row(f"{config.together} requests at once, 64 may wait", value, "all answered", ends=ends, health=health)]


def _idle_connections(config: Config) -> list[dict[str, Any]]:
    """Opens more connections than a process may have files at first, and asks beside them."""
    with _served() as server:
        address = httpx.URL(server.url)
        assert address.port is not None
        held = [socket.create_connection((address.host, address.port), timeout=10) for _ in range(config.connections)]
        times = []
        for _ in range(20):
            look = time.perf_counter()
            httpx.get(f"{server.url}/health", timeout=30).raise_for_status()
            times.append(time.perf_counter() - look)
        status = _ask(server, 1)[0]
        for each in held:
            each.close()
    value = f"`/health` in {1000 * statistics.median(times):.0f} ms (median of 20), a picture: {status}"
    return [_row(f"{config.connections} idle connections", value, "health and pictures answer", health=times)]


def _full_disk(config: Config) -> list[dict[str, Any]]:
    """Fills the disk, asks, empties it again, and asks again."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], capture_output=True)
        if mounted.returncode:
            return [_row("a full disk", "not tried: only root can make a small file system", "507, then pictures")]
        try:
            with _served(Path(folder)) as server:
                before = _ask(server, 0)[0]
                filler = Path(folder, "filler")
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(b"\0" * 65536)
                full = Counter(_ask(server, seed)[0] for seed in range(10))
                health = httpx.get(f"{server.url}/health").json()["status"]
                filler.unlink()
                after = Counter(_ask(server, seed)[0] for seed in range(10))
        finally:
            subprocess.run(["umount", folder], check=True)
    value = f"before {before}, full {dict(full)}, with room again {dict(after)}; `/health` meanwhile: {health}"
    return [_row("a disk that is full for a moment", value, "507, then 200", full=dict(full), after=dict(after))]


def _sigterm(config: Config) -> list[dict[str, Any]]:
    """Asks a server to end while it works, and starts another one in its folder."""
    with tempfile.TemporaryDirectory() as folder, _served(Path(folder), ("--grace", "20")) as server:
        names = [httpx.post(f"{server.url}/v1/jobs", json={**SHORT, "seed": seed}).json()["id"] for seed in range(30)]
        while httpx.get(f"{server.url}/v1/jobs/{names[0]}").json()["status"] == "queued":
            time.sleep(0.01)
        begin = time.perf_counter()
        code, seconds = server.end(), time.perf_counter() - begin
        with _served(Path(folder)) as following:
            ends = _ends(following, names)
    value = f"exit code {code} after {seconds:.1f} s; of 30 jobs the next server has {dict(ends)}"
    return [_row("SIGTERM with 30 jobs", value, "exit 0, none lost", ends=dict(ends))]


def _poison(config: Config) -> list[dict[str, Any]]:
    """Kills a rank whenever one certain job runs, as a job does that its ranks cannot survive."""
    with _served() as server:
        poison = httpx.post(f"{server.url}/v1/jobs", json={**SHORT, "seed": 1, "num_inference_steps": 200}).json()["id"]
        stop, kills = threading.Event(), [0]

        def kill() -> None:
            while not stop.wait(0.02):
                with contextlib.suppress(httpx.HTTPError, psutil.Error, KeyError):
                    job = httpx.get(f"{server.url}/v1/jobs/{poison}", timeout=30).json()
                    if job["status"] == "in_progress" and job["step"] and (ranks := server.ranks()):
                        os.kill(ranks[0].pid, signal.SIGKILL)
                        kills[0] += 1
                        stop.wait(0.5)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        names = [
            httpx.post(f"{server.url}/v1/jobs", json={**SHORT, "seed": seed}).json()["id"]
            for seed in range(config.good)
        ]
        begin = time.perf_counter()
        ends, bad = _ends(server, names), _ends(server, [poison])
        seconds = time.perf_counter() - begin
        stop.set()
        killer.join()
    value = (
        f"{ends['completed']} of {config.good} others completed within {seconds:.0f} s; it ended its ranks {kills[0]} "
        f"times and {'failed' if bad['failed'] else 'did not fail'}"
    )
    return [_row(f"one job that ends its ranks among {config.good}", value, f"all {config.good}", ends=dict(ends))]


def _ends(server: Server, names: Sequence[str]) -> Counter[str]:
    """Waits until jobs have ended; returns how."""
    while True:
        states = [httpx.get(f"{server.url}/v1/jobs/{name}", timeout=60).json().get("status", "lost") for name in names]
        if not set(states) & {"queued", "in_progress"}:
            return Counter(states)
        time.sleep(0.2)


if __name__ == "__main__":
    main(tyro.cli(Config))
