"""Measures promises about pictures and videos: by the clock on ranks of this machine, and by the planner's count."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from partsong import zoo
from partsong.errors import DistributedError
from partsong.evals.promises.evidence import Effort, Evidence, judged

__all__ = ["Forecast", "Sampled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Times the command a user runs, with the same strategy on several ranks and on one in turn.

    Attributes:
        command: `image` or `video`.
        model: of the zoo.
        strategy: as the command line takes it.
        factor: the speed-up that the paper promises for so many ranks.
        points: how many of the plain pipeline's facts may be lost, in per cent.
        nproc: ranks, one thread each.
        options: more options of the command.
    """

    command: Literal["image", "video"]
    model: str
    strategy: str
    factor: float
    points: float = 0.0
    nproc: int = 2
    options: tuple[str, ...] = ()

    def __call__(self, effort: Effort, work: Path) -> Evidence:
        """Samples a caption for each round, on all ranks and on one, each beside the plain pipeline."""
        task = zoo.MODELS[self.model].task
        captions = task.captions(effort.rounds, 7)
        pairs = [
            [self._run(caption, effort.seed + i, n) for n in (self.nproc, 1)] for i, caption in enumerate(captions)
        ]
        many = [pair[0] for pair in pairs]
        speeds = sorted(one["seconds"] / run["seconds"] for run, one in pairs)
        value = statistics.median(speeds)
        facts, plain = (_mean([run[name] for run in many]) for name in ("facts_read", "facts_read_serial"))
        good = facts is None or plain is None or facts >= plain - self.points / 100
        read = "" if facts is None or plain is None else f"; facts read {facts:.0%}, plain pipeline {plain:.0%}"
        seconds = statistics.median(run["seconds"] for run in many)
        return Evidence(
            value=value,
            low=speeds[0],
            high=speeds[-1],
            measured=f"{value:.2f}x on {self.nproc} ranks ({speeds[0]:.2f}x to {speeds[-1]:.2f}x){read}",
            cost=f"{seconds:.2f} s; one rank sends {_sent(many[0]) / 1e6:.2f} MB",
            verdict=judged(met=good and value >= self.factor, helps=good and speeds[0] > 1),
        )

    def _run(self, caption: str, seed: int, nproc: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="partsong-") as folder:
            suffix = "png" if self.command == "image" else "mp4"
            ranks = ["--nproc", str(nproc), "--threads", "1", "--strategy", self.strategy, "--compare"]
            files = ["--out", f"{folder}/out.{suffix}", "--json", f"{folder}/out.json"]
            more = ["--model", self.model, "--seed", str(seed), *ranks, *files, *self.options]
            call = [sys.executable, "-m", "partsong", self.command, caption, *more]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            if done.returncode:
                raise DistributedError(f"partsong {self.command} --strategy {self.strategy}: {done.stderr.strip()}")
            return json.loads(Path(folder, "out.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Compares two strategies by what the planner predicts for a published model; nothing is computed.

    Attributes:
        model: a published model that the planner knows.
        strategy: the strategy of the paper, as the command line takes it; several with a space between them.
        than: what it is compared with; "" is one device.
        gpus: the devices, such as 8xh100.
        link: between them.
        counts: `bytes_sent`, which is exact, or `seconds` or `memory`.
        share: the share of the other's count that the paper promises, at most.
        size: height and width in pixels; None takes the model's own.
        per_node: devices of a machine; None takes all.
        across: the link between machines.
    """

    model: str
    strategy: str
    than: str
    gpus: str
    counts: Literal["bytes_sent", "seconds", "memory"]
    share: float
    link: str = "pcie4"
    size: int | None = None
    per_node: int | None = None
    across: str | None = None

    def __call__(self, effort: Effort, work: Path) -> Evidence:
        """Predicts both; the interval is the planner's own, and none where bytes are counted."""
        from partsong.planner import advise, machine_named, subject_named
        from partsong.samplers.registry import parse_strategy

        machine = machine_named(self.gpus, self.link, per_node=self.per_node, across=self.across, memory=1e15)
        mixes = [tuple(map(parse_strategy, text.split())) for text in (self.strategy, self.than)]
        subject, side = subject_named(self.model), self.size
        rows = advise(subject, machine, height=side, width=side, only=mixes, max_drift=1.0).rows
        first, second = (next(row for row in rows if row.strategies == mix) for mix in mixes)
        value = getattr(first, self.counts) / getattr(second, self.counts)
        low, high = value, value
        if self.counts == "seconds":
            low, high = (value * end / first.seconds for end in (first.seconds_low, first.seconds_high))
        unit = {"bytes_sent": "of the bytes", "seconds": "of the time", "memory": "of the memory"}[self.counts]
        exact = "counted" if self.counts == "bytes_sent" else f"predicted, {low:.2f} to {high:.2f}"
        return Evidence(
            value=value,
            low=low,
            high=high,
            measured=f"{value:.2g} {unit} ({exact})",
            cost=f"{first.seconds:.2f} s and {first.bytes_sent / 1e9:.2f} GB a rank, by prediction",
            verdict=judged(met=value <= self.share, helps=value < 1),
        )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _sent(run: dict[str, Any]) -> float:
    sent = run["bytes_sent"]
    return float(max(sent) if isinstance(sent, list) else sent or 0)
