"""Times ranks with one slow rank, in equal parts and by shares: ``python benchmarks/ranks/unlike_ranks.py``.

The slow rank sleeps after its matrix products, convolutions and attentions, as long as they took or several times that:
a device of a fraction of the speed that takes nothing from this machine's processors. With ``--how work`` it makes them
several times instead. All cases run in turn, so what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.filing import file_result, markdown_table, result_path, spread
from partsong import Mesh, launch, measure_shares, mesh_for, parallelize, parse_strategy
from partsong.evals.bench.models import BENCH_MODELS
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.ledger import Ledger

aten = torch.ops.aten
HEAVY = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear, aten.matmul),
    *(aten._scaled_dot_product_flash_attention_for_cpu, aten.scaled_dot_product_attention),
}
#: Steps before the timed ones: the first compare inputs between ranks, and displaced patches warm up.
STEPS_BEFORE = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    models: tuple[str, ...] = ("flux-like",)
    """Names of models of `partsong bench image`."""
    tokens: int = 1024
    """Image tokens."""
    times: int = 2
    """How many times as long the last rank takes."""
    how: Literal["sleep", "work"] = "sleep"
    """Whether it sleeps or works in that time."""
    strategies: tuple[str, ...] = ("ulysses", "ring", "displaced-patch:warmup_steps=1")
    """Strategies as command lines name them."""
    repeats: int = 5
    """Rounds; the median counts."""


class Slowed(TorchDispatchMode):
    """Makes heavy operators take a multiple of their time.

    Args:
        times: which multiple.
        sleeps: sleeps in the rest of that time, and otherwise makes the operator again.

    Attributes:
        slept: seconds so far.
    """

    def __init__(self, times: int, sleeps: bool) -> None:
        super().__init__()
        self.times, self.sleeps, self.slept, self._due = times, sleeps, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.times == 1 or func.overloadpacket not in HEAVY:
            return func(*args, **(kwargs or {}))
        start = time.thread_time()
        for _ in range(0 if self.sleeps else self.times - 1):
            func(*args, **(kwargs or {}))
        output = func(*args, **(kwargs or {}))
        if self.sleeps:
            self._due += (self.times - 1) * (time.thread_time() - start)
        if self._due > 1e-3:  # a shorter sleep would be as long as a longer one
            began = time.perf_counter()
            time.sleep(self._due)
            self.slept += time.perf_counter() - began
            self._due -= time.perf_counter() - began
        return output

    def clock(self) -> float:
        """Returns the seconds that this rank's device has worked, without the time of other programs."""
        return time.thread_time() + self.slept


@dataclass(slots=True)
class Case:
    """Holds one way to run a model, and its measurements on this rank.

    Attributes:
        strategy: as the command line names it; ``serial`` is just the fast rank.
        cut: how its tokens are cut.
        module: a copy of the model with the strategy on it.
        shares: those of the mesh.
    """

    strategy: str
    cut: str
    module: nn.Module
    shares: tuple[float, ...] | None = None
    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    sent: int = 0


def on_rank(config: Config) -> list[dict[str, Any]]:
    """Times all cases on this rank together with the others."""
    quiet_libraries()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with Mesh(ulysses=2) as mesh, torch.inference_mode():
        slowed = Slowed(1 if mesh.is_main else config.times, config.how == "sleep")
        with slowed:
            for name in config.models:
                rows += _rows(config, name, slowed, mesh)
    return rows


def _rows(config: Config, name: str, slowed: Slowed, mesh: Mesh) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    bench = BENCH_MODELS[name]
    module, inputs = bench.build().eval(), bench.inputs(config.tokens, 0.5)
    measured = measure_shares(mesh, lambda: module(**inputs), repeats=3, clock=slowed.clock)
    cases = [Case("serial", "the fast rank alone", module), *_cases(config, module, measured)]
    for step in range(STEPS_BEFORE + config.repeats):
        named = bench.inputs(config.tokens, 0.6 - 0.02 * step)
        for case in cases:
            _step(case, named, mesh, slowed, counts=step >= STEPS_BEFORE)
    return [_row(name, case, cases[0], mesh) for case in cases]


def _cases(config: Config, module: nn.Module, measured: tuple[float, ...]) -> list[Case]:
    exact = (float(config.times), 1.0)
    cases = []
    for text in config.strategies:
        strategy = parse_strategy(text)
        for cut, shares in {"equal": None, "by speed": exact, "measured": measured}.items():
            twin = copy.deepcopy(module, memo={id(p): p for p in module.parameters()})
            parallelize(twin, strategy, mesh=Mesh(**mesh_for((strategy,), 2), shares=shares))
            cases.append(Case(text, cut, twin, shares))
    return cases


def _step(case: Case, named: dict[str, Any], mesh: Mesh, slowed: Slowed, *, counts: bool) -> None:
    gather(mesh, [0.0], "start of a step")
    seconds, busy = time.perf_counter(), slowed.clock()
    with Ledger(flops=False) as ledger:
        if case.strategy != "serial" or mesh.is_main:
            case.module(**named)
    busy, seconds = slowed.clock() - busy, time.perf_counter() - seconds
    if counts:
        case.seconds.append(seconds)
        case.busy.append(busy)
        case.sent = int(ledger.summary()["bytes_sent"])


def _row(model: str, case: Case, serial: Case, mesh: Mesh) -> dict[str, Any]:
    """Returns the measurements of all ranks; a step takes as long as the slowest rank."""
    seconds = [max(each) for each in zip(*gather(mesh, case.seconds, "seconds"), strict=True)]
    alone = [max(each) for each in zip(*gather(mesh, serial.seconds, "seconds alone"), strict=True)]
    busy = [statistics.median(each) for each in gather(mesh, case.busy, "busy seconds")]
    busy_alone = max(statistics.median(each) for each in gather(mesh, serial.busy, "busy seconds alone"))
    ratios = [one / other for one, other in zip(alone, seconds, strict=True)]
    return {
        "model": model,
        "strategy": case.strategy,
        "cut": case.cut,
        "shares": case.shares,
        "seconds_median": statistics.median(seconds),
        "speedup": statistics.median(ratios),
        "spread": spread(seconds),
        "busy": busy,
        "speedup_of_busiest": busy_alone / max(busy),
        "bytes_sent": [int(row[0]) for row in gather(mesh, [float(case.sent)], "bytes")],
    }


def main(config: Config) -> None:
    """Times the cases and writes the files."""
    rows = launch(on_rank, 2, config)
    how = "sleeps after" if config.how == "sleep" else "repeats"
    note = (
        f"Two ranks with one thread each, {config.tokens} image tokens, float32, random weights. The second rank {how} "
        f"its matrix products and attentions, so that they take {config.times} times as long. *Speed-up* is against "
        f"the fast rank alone, of wall seconds in rounds side by side (median of {config.repeats}). *Busy* are "
        "processor seconds per step of each rank, with what it slept; they leave out what other programs take, and "
        "waits for messages. *Of the busiest* is the speed-up of the rank that has most of them. Shares were measured "
        "in busy seconds too, of a call of the whole model on each rank."
    )
    columns = ("model", "strategy", "cut", "shares", "seconds", "speed-up", "of the busiest", "busy", "MB sent")
    lines = [
        (
            row["model"],
            f"`{row['strategy']}`",
            row["cut"],
            "-" if row["shares"] is None else " : ".join(f"{share:g}" for share in row["shares"]),
            f"{row['seconds_median']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_of_busiest']:.2f}x",
            " and ".join(f"{busy:.2f}" for busy in row["busy"]),
            " and ".join(f"{sent / 1e6:.1f}" for sent in row["bytes_sent"]),
        )
        for row in rows
    ]
    spreads = {f"{row['model']} {row['strategy']} {row['cut']}": row["spread"] for row in rows}
    title = "Uneven GPUs, cut by their shares"
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, title, note, table, spreads=spreads)


if __name__ == "__main__":
    main(tyro.cli(Config))
