"""Times steps whose blocks are compiled between exchanges: ``python -m benchmarks.ranks.capture``.

All cases take each step in turn, so what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import tyro
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.filing import file_result, markdown_table, result_path, spread
from partsong import Mesh, capture, launch, mesh_for, parallelize, parse_strategy
from partsong.evals.bench.models import BENCH_MODELS
from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather

#: The first step runs as it is, the second compiles, and the third finds what is compiled.
STEPS_BEFORE = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to time."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    model: str = "flux-like"
    """Name of a model of `partsong bench image`."""
    tokens: int = 256
    """Image tokens."""
    strategies: tuple[str, ...] = ("ulysses", "ring", "token-ring", "tensor-parallel")
    """Exact strategies of one axis, as command lines name them."""
    repeats: int = 7
    """Rounds; the median counts."""


@dataclass(slots=True)
class Case:
    """Holds one way to run the model, and its measurements on this rank."""

    name: str
    is_compiled: bool
    module: nn.Module
    seconds: list[float] = field(default_factory=list)
    output: Tensor | None = None
    graphs: dict[str, int] = field(default_factory=dict)


def on_rank(config: Config) -> list[dict[str, Any]]:
    """Times all cases on this rank together with the other."""
    quiet_libraries()
    torch.set_num_threads(1)
    # Every case compiles the same blocks' code anew, because their hooks are others.
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    bench = BENCH_MODELS[config.model]
    module = bench.build().eval()
    with Mesh(data=2) as mesh, torch.inference_mode():
        cases = []
        for text in ("serial", *config.strategies):
            graphs = _graphs(_twin(module), text, bench.inputs(config.tokens, 0.6))
            cases += [Case(text, is_compiled, _twin(module), graphs=graphs) for is_compiled in (False, True)]
        torch._dynamo.reset()
        for case in cases:
            _prepare(case.module, case.name, "inductor" if case.is_compiled else None)
        for step in range(STEPS_BEFORE + config.repeats):
            named = bench.inputs(config.tokens, 0.6 - 0.02 * step)
            for case in cases:
                _step(case, named, mesh, counts=step >= STEPS_BEFORE)
        return [_row(case, cases[0], mesh) for case in cases]


def _twin(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module, memo={id(parameter): parameter for parameter in module.parameters()})


def _prepare(module: Any, text: str, backend: str | None) -> None:
    """Puts a strategy on a model and compiles its blocks, if there is one and a compiler is named."""
    if text == "serial":
        if backend is not None:
            module.compile_repeated_blocks(backend=backend)
        return
    strategy = parse_strategy(text)
    plan = parallelize(module, strategy, mesh=Mesh(**mesh_for((strategy,), 2)))
    if backend is not None:
        capture(plan, backend=backend)


def _graphs(module: nn.Module, text: str, named: dict[str, Any]) -> dict[str, int]:
    """Counts what two steps compile, with nothing compiled before and no code generated."""
    torch._dynamo.reset()
    counters.clear()
    _prepare(module, text, "eager")
    for _ in range(2):
        module(**named)
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "operators": counters["stats"]["calls_captured"],
        # Pauses that are not partsong's own at exchanges.
        "other_breaks": sum("torch.compiler.disable" not in reason for reason in counters["graph_break"]),
    }


def _step(case: Case, named: dict[str, Any], mesh: Mesh, *, counts: bool) -> None:
    gather(mesh, [0.0], "start of a step")
    seconds = time.perf_counter()
    case.output = case.module(**named)[0]
    if counts:
        case.seconds.append(time.perf_counter() - seconds)


def _row(case: Case, serial: Case, mesh: Mesh) -> dict[str, Any]:
    """Returns the measurements; a step takes as long as the slower rank."""
    seconds = [max(each) for each in zip(*gather(mesh, case.seconds, "seconds"), strict=True)]
    alone = [max(each) for each in zip(*gather(mesh, serial.seconds, "seconds alone"), strict=True)]
    assert case.output is not None and serial.output is not None
    difference = (case.output - serial.output).norm() / serial.output.norm()
    return {
        "strategy": case.name,
        "compiled": case.is_compiled,
        "seconds_median": statistics.median(seconds),
        "spread": spread(seconds),
        "speedup": statistics.median(one / other for one, other in zip(alone, seconds, strict=True)),
        **(case.graphs if case.is_compiled else {}),
        "difference": max(float(row[0]) for row in gather(mesh, [difference.item()], "differences")),
    }


def main(config: Config) -> None:
    """Times the cases and writes the files."""
    rows = launch(on_rank, 2, config)
    note = (
        f"Two ranks with one thread each, {config.model} with random weights, {config.tokens} image tokens, float32. "
        "*Compiled* is `capture(plan)`, for the serial model diffusers' `compile_repeated_blocks`, both with torch's "
        "default compiler for CPUs. *Speed-up* is against the uncompiled serial model, which both ranks compute at the "
        f"same time, in rounds side by side (median of {config.repeats}). *Graphs* are the "
        "pieces that two steps compile, *operators* what is in them, *other breaks* where compiled code pauses but for "
        "partsong's exchanges. *Difference* is of the last step's output from the serial one, relative."
    )
    columns = ("strategy", "compiled", "s", "speed-up", "graphs", "operators", "other breaks", "difference")
    lines = [
        (
            row["strategy"],
            "yes" if row["compiled"] else "no",
            f"{row['seconds_median']:.3f}",
            f"{row['speedup']:.2f}x",
            *(row.get(name, "-") for name in ("graphs", "operators", "other_breaks")),
            f"{row['difference']:.1e}",
        )
        for row in rows
    ]
    spreads = {f"{row['strategy']} {'compiled' if row['compiled'] else ''}".strip(): row["spread"] for row in rows}
    table = markdown_table(columns, lines)
    file_result(config.out, __file__, rows, "Blocks compiled between exchanges", note, table, spreads=spreads)


if __name__ == "__main__":
    main(tyro.cli(Config))
