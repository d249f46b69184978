"""Times a denoiser that a client calls through a server: ``python benchmarks/serving/denoise.py``.

A sampler in this process draws the same latents with the denoiser in this process, and in a session of a server.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
import torch
import tyro
from torch import Tensor

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.serving.server import PROMPT, Server
from partsong import zoo
from partsong.jobs.load import LoadWatch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    steps: int = 12
    """Steps of a generation."""
    repeats: int = 7
    """Rounds; the median counts."""
    sides: tuple[int, ...] = (16, 32)
    """Height and width in latents."""
    strategies: tuple[str, ...] = ("serial", "cfg-parallel", "ulysses")
    """Of the sessions."""


def main(config: Config) -> None:
    """Measures all sessions and writes the files."""
    watch, rows = LoadWatch(), []
    torch.set_num_threads(1)
    pipe = zoo.load("shapes")
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), 2)
        try:
            for side in config.sides:
                rows += _rows(server, pipe, side, config)
            load = watch.report()
        finally:
            server.end()
    lines = [
        (f"{row['side']} x {row['side']}", row["strategy"], f"{row['here_ms']:.1f}", f"{row['session_ms']:.1f}",
         f"{row['ranks_ms']:.1f}", f"{row['ratio']:.2f}", f"{row['difference']:.1e}")
        for row in rows
    ]  # fmt: skip
    table = markdown_table(
        ("latents", "strategy", "here, ms a step", "session, ms a step", "of it on the ranks", "ratio", "difference"),
        lines,
    )
    note = (
        f"`shapes`, {config.steps} Euler steps with guidance in one batch, medians of {config.repeats} rounds in turn; "
        "one thread here and on each of two ranks, all on one machine over loopback. The ratio is of the median of "
        "pairs. The difference is the largest of the latents at the end, of their largest value."
    )
    file_result(config.out, __file__, rows, "A denoiser called through a server", note, table, load=load)


def _rows(server: Server, pipe: Any, side: int, config: Config) -> list[dict[str, Any]]:
    with torch.no_grad():
        cond, uncond, pooled, unpooled = pipe.encode_prompt(PROMPT, None, None)
    text = {"encoder_hidden_states": torch.cat([uncond, cond]), "pooled_projections": torch.cat([unpooled, pooled])}
    noise = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(0))

    def here(named: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return pipe.transformer(**named, **text).sample

    expected = _loop(here, noise, config.steps)
    rows = []
    for strategy in config.strategies:
        pairs, ranks, difference = [], [], 0.0
        for _ in range(config.repeats):
            begin = time.perf_counter()
            _loop(here, noise, config.steps)
            alone = time.perf_counter() - begin
            session = _Session(server, strategy, text)
            begin = time.perf_counter()
            drawn = _loop(session.call, noise, config.steps)
            pairs.append((alone, time.perf_counter() - begin))
            ranks.append(session.close())
            difference = max(difference, float((drawn - expected).abs().max() / expected.abs().max()))
        per_step = 1000 / config.steps
        rows.append(
            {
                "side": side,
                "strategy": strategy,
                "here_ms": per_step * statistics.median(alone for alone, _ in pairs),
                "session_ms": per_step * statistics.median(there for _, there in pairs),
                "ranks_ms": per_step * statistics.median(ranks),
                "ratio": statistics.median(there / alone for alone, there in pairs),
                "difference": difference,
                "pairs": pairs,
            }
        )
    return rows


class _Session:
    """Calls the denoiser through a server; the text is sent once."""

    def __init__(self, server: Server, strategy: str, text: dict[str, Tensor]) -> None:
        self._client = httpx.Client(base_url=f"{server.url}/v1/denoise", timeout=600)
        self._name = self._client.post("/sessions", json={"model": "shapes", "strategy": strategy}).json()["id"]
        self._text, self._unchanged = text, list[str]()

    def call(self, named: dict[str, Tensor]) -> Tensor:
        sent = named if self._unchanged else {**named, **self._text}
        body = safetensors.torch.save(sent, {"unchanged": json.dumps(self._unchanged)})
        headers = {"Content-Type": "application/octet-stream"}
        reply = self._client.post(f"/sessions/{self._name}", content=body, headers=headers)
        reply.raise_for_status()
        self._unchanged = list(self._text)
        return safetensors.torch.load(reply.content)["sample"]

    def close(self) -> float:
        """Ends it and returns the seconds of its calls on the ranks."""
        return float(self._client.delete(f"/sessions/{self._name}").json()["seconds"])


def _loop(call: Callable[[dict[str, Tensor]], Tensor], latents: Tensor, steps: int) -> Tensor:
    for level, following in pairwise(torch.linspace(1, 0, steps + 1)):
        without, towards = call(
            {"hidden_states": latents.repeat(2, 1, 1, 1), "timestep": 1000 * level.repeat(2)}
        ).chunk(2)
        latents = latents + (following - level) * (without + 4 * (towards - without))
    return latents


if __name__ == "__main__":
    main(tyro.cli(Config))
