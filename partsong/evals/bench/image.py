"""Times one denoiser step with each strategy, with diffusers' own parallelism and with one process, in turn.

Every case is timed once per round and the median over the rounds counts, so a slow moment of a shared machine affects
all cases. Serial is one process with one thread while the others wait idle; parallel is `nproc` processes with one
thread each. ``DisplacedPatch`` is timed after its warm-up. The case `LIMIT` runs the serial step in all processes at
once. It shows how fast the shared caches and memory of the machine allow `nproc` steps to be.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, profiler

from partsong.errors import ArgumentError
from partsong.evals.bench.models import BENCH_MODELS
from partsong.evals.bench.peers import cpu_shims, diffusers_ring, diffusers_tensor, diffusers_ulysses
from partsong.jobs.pipelines import quiet_libraries
from partsong.ledger import Ledger
from partsong.parallel import AXES, Mesh, mesh_for, parallelize
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.ranges import named_range
from partsong.parallel.strategy import Strategy, combined_kind
from partsong.planner.calibration import find_calibration
from partsong.planner.choice import CLEAR
from partsong.planner.clock import replay
from partsong.planner.trace import trace_calls
from partsong.samplers.registry import parse_strategy

__all__ = ["run"]

PEERS: dict[str, Callable[[nn.Module, int], None]] = {
    "diffusers Ulysses": diffusers_ulysses,
    "diffusers ring": diffusers_ring,
    "diffusers tensor parallel": diffusers_tensor,
}
AUTO = "auto"
Mix = tuple[Strategy, ...]
#: Untimed steps; the first waits for fresh keys, from the second on exchanges are asynchronous and by their wire.
STEPS_BEFORE = 2
#: The time of the step that is traced, after all that are timed.
LAST = 0.01
#: The case in which every process computes the whole serial step at the same time and nothing is exchanged.
LIMIT = "serial on every process"


def run(
    *,
    nproc: int = 2,
    repeats: int = 5,
    models: Sequence[str] = tuple(BENCH_MODELS),
    tokens: Sequence[int] = (1024, 4096),
    peers: bool = True,
    profile: Path | None = None,
    strategies: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Times all cases and returns a row per model, size and case.

    Args:
        nproc: ranks, one thread each.
        repeats: rounds; the median counts.
        models: names of `BENCH_MODELS`.
        tokens: numbers of image tokens, to which 128 text tokens are added.
        peers: whether to time diffusers' own context parallelism too.
        profile: a folder for Chrome traces of one more step of every case on the first rank, a file for each model and
            size; None writes none.
        strategies: what to time instead of the usual mixes, as on a command line, with ``+`` between several; ``auto``
            is the exact mix that the planner predicts to be fastest on this machine.

    Raises:
        ArgumentError: a strategy is unknown, or ``auto`` is asked for on a machine that was not measured.
    """
    # Parsed here as well, so that unknown names are refused before any rank is started.
    given = {name: tuple(map(parse_strategy, name.split("+"))) for name in strategies if name != AUTO}
    mixes = {
        (model, count): {name: given[name] if name in given else _fastest(model, count, nproc) for name in strategies}
        for model in models
        for count in tokens
    }
    return launch(_on_rank, nproc, nproc, repeats, tuple(models), tuple(tokens), peers, profile, mixes)


@dataclass(slots=True)
class _Case:
    """Holds one case: its own copy of the model, and the measurements."""

    name: str
    module: nn.Module
    everyone: bool = True
    ours: bool = False
    seconds: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sent: int = 0
    first: Tensor | None = None


def _on_rank(
    nproc: int,
    repeats: int,
    models: tuple[str, ...],
    tokens: tuple[int, ...],
    peers: bool,
    profile: Path | None,
    mixes: Mapping[tuple[str, int], Mapping[str, Mix]],
) -> list[dict[str, Any]]:
    quiet_libraries()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    # The first mesh starts the process group, which the meshes of the strategies share, and so must end last.
    with Mesh(ulysses=nproc) as mesh, torch.inference_mode(), cpu_shims():
        for model in models:
            torch.manual_seed(0)
            row = BENCH_MODELS[model]
            module = row.build().eval()
            for count in tokens:
                named = mixes[model, count] or {" + ".join(map(_name, mix)): mix for mix in row.mixes}
                cases = _cases(named, module, nproc, peers and row.peers)
                _rounds(cases, row.inputs, count, repeats, mesh)
                if profile is not None:
                    _trace(cases, row.inputs(count, LAST), mesh, profile / f"{model}-{count}.json")
                rows += [_row(model, count, case, cases[0], mesh) for case in cases]
    return rows


def _fastest(model: str, tokens: int, nproc: int) -> Mix:
    """Returns the exact mix of a model that the planner predicts to be fastest; none where one rank nearly is."""
    if (measured := find_calibration(nproc)) is None:
        raise ArgumentError(f"this machine was not measured; run `partsong calibrate --nproc {nproc}` once")
    torch.manual_seed(0)
    row = BENCH_MODELS[model]
    module, seconds = row.build().eval(), dict[Mix, float]()
    for mix in ((), *(mix for mix in row.mixes if combined_kind(mix) == "exact")):
        ranks = nproc if mix else 1
        trace = trace_calls(module, mix, ranks, row.inputs(tokens, 0.5))
        seconds[mix] = replay(trace, measured.machine(ranks)).steady
    best = min(seconds, key=lambda mix: seconds[mix])
    return best if seconds[best] * CLEAR < seconds[()] else ()


def _cases(mixes: Mapping[str, Mix], module: nn.Module, nproc: int, peers: bool) -> list[_Case]:
    cases = [_Case("serial", module, everyone=False), _Case(LIMIT, module)]
    for name, mix in mixes.items():
        label = f"{name}: {' + '.join(map(_name, mix)) or 'serial'}" if name == AUTO else name
        if not mix:
            cases.append(_Case(label, module, everyone=False))
            continue
        # A copy, since replacing weights must not affect the other cases.
        copied = copy.deepcopy(module) if any(strategy.cuts_weights for strategy in mix) else _sharing_weights(module)
        parallelize(copied, *mix, mesh=Mesh(**mesh_for(mix, nproc)))
        cases.append(_Case(label, copied, ours=True))
    for name, enable in PEERS.items() if peers else ():
        copied = copy.deepcopy(module) if enable is diffusers_tensor else _sharing_weights(module)
        if enable is not diffusers_tensor or getattr(module, "_tp_plan", None) is not None:
            enable(copied, nproc)
            cases.append(_Case(name, copied))
    return cases


def _name(strategy: Strategy) -> str:
    """Names a strategy by its type and the knobs that are not the default, except the warm-up, which is not timed."""
    knobs = (knob for knob in fields(strategy) if knob.name != "warmup_steps")
    changed = [f"{k.name}={getattr(strategy, k.name)!r}" for k in knobs if getattr(strategy, k.name) != k.default]
    return type(strategy).__name__ + (f"({', '.join(changed)})" if changed else "")


def _sharing_weights(module: nn.Module) -> nn.Module:
    """Copies a module but shares its weights, so that every case reads the same memory."""
    return copy.deepcopy(module, memo={id(p): p for p in module.parameters()})


def _rounds(
    cases: list[_Case], inputs: Callable[[int, float], dict[str, Any]], count: int, repeats: int, mesh: Mesh
) -> None:
    """Runs all cases in turn at falling timesteps; the first steps are not timed."""
    for step in range(STEPS_BEFORE + repeats):
        named = inputs(count, 0.6 - 0.02 * step)
        for case in cases:
            seconds, waited, exposed, cpu = _step(case, named, mesh)
            if step >= STEPS_BEFORE:
                case.seconds.append(seconds)
                case.waiting.append(waited)
                case.exposed.append(exposed)
                case.cpu.append(cpu)


def _trace(cases: list[_Case], named: dict[str, Any], mesh: Mesh, path: Path) -> None:
    """Traces the first rank in one more step of every case, each as a range of its name."""
    kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profiler.profile(activities=kinds) if mesh.is_main else nullcontext() as trace:
        for case in cases:
            with named_range(case.name):
                _step(case, named, mesh)
    if trace is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))


def _step(case: _Case, named: dict[str, Any], mesh: Mesh) -> tuple[float, float, float, float]:
    """Runs one step of a case and returns the slowest rank's wall time, the longest and the least wait, and CPU time.

    The rank that waits longest had the faster core. The least wait is the cost of the exchange itself.
    """
    everyone = mesh.axis(*AXES)
    agree(everyone, [0.0])
    start, spent, waited = time.perf_counter(), time.process_time(), 0.0
    if case.everyone or mesh.is_main:
        with Ledger(flops=False) as ledger:
            output = case.module(**named, return_dict=False)[0]
            waited, case.sent = ledger.summary()["seconds_waiting"], int(ledger.summary()["bytes_sent"])
        if not case.seconds:
            case.first = output
    mine, spent = time.perf_counter() - start, time.process_time() - spent
    table = agree(everyone, [mine, waited, spent])
    used = table if case.everyone else table[:1]
    waits = [row[1] for row in used]
    return max(row[0] for row in used), max(waits), min(waits), sum(row[2] for row in used)


def _row(model: str, count: int, case: _Case, serial: _Case, mesh: Mesh) -> dict[str, Any]:
    seconds, reference = statistics.median(case.seconds), statistics.median(serial.seconds)
    error = 0.0
    if mesh.is_main:
        assert case.first is not None and serial.first is not None
        error = ((case.first - serial.first).norm() / serial.first.norm()).item()
    steps = mesh.world_size if case.name == LIMIT else 1
    return {
        "name": f"{model} {case.name}",
        "model": model,
        "case": case.name,
        "size": count,
        "seconds_median": seconds,
        "ratio_to_serial": steps * reference / seconds,
        "processor_seconds": statistics.median(case.cpu),
        "relative_drift": error,
        "waiting_fraction": statistics.median(case.waiting) / seconds if case.ours else None,
        "waiting_least_fraction": statistics.median(case.exposed) / seconds if case.ours else None,
        "bytes_sent_per_step": case.sent if case.ours else None,
        "seconds_all": case.seconds,
    }
