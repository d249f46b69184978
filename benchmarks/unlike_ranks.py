"""Times ranks of which one is slow, in equal parts and by shares: ``python benchmarks/unlike_ranks.py --out NAME``.

The slow rank makes every matrix product, convolution and attention several times, which is a device of a fraction of
the speed that takes nothing from the others. All cases run in turn, so what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from filing import file_result, markdown_table, spread
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partsong import Mesh, launch, measure_shares, mesh_for, parallelize, parse_strategy
from partsong.evals.bench.models import BENCH_MODELS
from partsong.jobs.compare import gather
from partsong.jobs.pipelines import quiet_libraries
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

    out: Path
    """Result files without suffix."""
    models: tuple[str, ...] = ("flux-like",)
    """Names of models of `partsong bench image`."""
    tokens: int = 1024
    """Image tokens."""
    times: int = 2
    """How often the last rank does its work."""
    strategies: tuple[str, ...] = ("ulysses", "ring", "displaced-patch:warmup_steps=1")
    """Strategies as command lines name them."""
    repeats: int = 5
    """Rounds; the median counts."""


class Repeated(TorchDispatchMode):
    """Makes heavy operators several times.

    Args:
        times: how often.
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for _ in range(self.times - 1 if func.overloadpacket in HEAVY else 0):
            func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class Case:
    """Holds one way to run a model, and what was measured of it on this rank.

    Attributes:
        strategy: as the command line names it; ``serial`` is the fast rank alone.
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
    with Mesh(ulysses=2) as mesh, torch.inference_mode(), Repeated(1 if mesh.is_main else config.times):
        for name in config.models:
            torch.manual_seed(0)
            bench = BENCH_MODELS[name]
            module = bench.build().eval()
            inputs = bench.inputs(config.tokens, 0.5)
            measured = measure_shares(
                mesh, lambda module=module, inputs=inputs: module(**inputs), repeats=3, clock=time.thread_time
            )
            cases = [Case("serial", "the fast rank alone", module), *_cases(config, module, measured)]
            for step in range(STEPS_BEFORE + config.repeats):
                for case in cases:
                    _step(case, bench.inputs(config.tokens, 0.6 - 0.02 * step), mesh, counts=step >= STEPS_BEFORE)
            rows += [_row(name, case, cases[0], mesh) for case in cases]
    return rows


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


def _step(case: Case, named: dict[str, Any], mesh: Mesh, *, counts: bool) -> None:
    gather(mesh, [0.0], "start of a step")
    seconds, busy = time.perf_counter(), time.thread_time()
    with Ledger(flops=False) as ledger:
        if case.strategy != "serial" or mesh.is_main:
            case.module(**named)
    busy, seconds = time.thread_time() - busy, time.perf_counter() - seconds
    if counts:
        case.seconds.append(seconds)
        case.busy.append(busy)
        case.sent = int(ledger.summary()["bytes_sent"])


def _row(model: str, case: Case, serial: Case, mesh: Mesh) -> dict[str, Any]:
    """Returns what was measured on all ranks; a step takes as long as the rank that is done last."""
    seconds = [max(each) for each in zip(*gather(mesh, case.seconds, "seconds"), strict=True)]
    alone = [max(each) for each in zip(*gather(mesh, serial.seconds, "seconds alone"), strict=True)]
    busy = [statistics.median(each) for each in gather(mesh, case.busy, "processor seconds")]
    busy_alone = max(statistics.median(each) for each in gather(mesh, serial.busy, "processor seconds alone"))
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
        "speedup_of_processors": busy_alone / max(busy),
        "bytes_sent": [int(row[0]) for row in gather(mesh, [float(case.sent)], "bytes")],
    }


def main(config: Config) -> None:
    """Times the cases and writes the files."""
    rows = launch(on_rank, 2, config)
    note = (
        f"Two ranks with one thread each, {config.tokens} image tokens, float32, random weights. The second rank makes "
        f"each matrix product and attention {config.times} times, so equal parts make it the one that all wait for. "
        "*Speed-up* is against the fast rank alone, of wall seconds in rounds side by side (median of "
        f"{config.repeats}). *Of processors* is the same of the processor seconds of the rank that works longest, "
        "which leaves out what other programs do to the clock, and also what ranks wait for messages. *Busy* are "
        "processor seconds per step of each rank. Shares were measured by the processor seconds of a call of the whole "
        "model on each rank."
    )
    columns = ("model", "strategy", "cut", "shares", "seconds", "speed-up", "of processors", "busy", "MB sent")
    lines = [
        (
            row["model"],
            f"`{row['strategy']}`",
            row["cut"],
            "-" if row["shares"] is None else " : ".join(f"{share:g}" for share in row["shares"]),
            f"{row['seconds_median']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_of_processors']:.2f}x",
            " and ".join(f"{busy:.2f}" for busy in row["busy"]),
            " and ".join(f"{sent / 1e6:.1f}" for sent in row["bytes_sent"]),
        )
        for row in rows
    ]
    spreads = {f"{row['model']} {row['strategy']} {row['cut']}": row["spread"] for row in rows}
    title = "Ranks that are unlike, cut by their shares"
    table = markdown_table(columns, lines)
    file_result(config.out, "benchmarks/unlike_ranks.py", rows, title, note, table, spreads=spreads)


if __name__ == "__main__":
    main(tyro.cli(Config))
