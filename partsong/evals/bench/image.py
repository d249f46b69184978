"""Times one denoiser step with each strategy, with diffusers' own parallelism and with one process, in turn.

Every case is timed once per round and the median over the rounds counts, so a slow moment of a shared machine affects
all cases. Serial is one process with one thread while the others wait idle; parallel is `nproc` processes with one
thread each. ``DisplacedPatch`` is timed after its warm-up. The case `LIMIT` runs the serial step in all processes at
once. It shows how fast `nproc` steps can be, given that caches and memory are shared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import profiler

from partsong.accelerator import is_on_host, synchronize
from partsong.evals.bench.image_cases import AUTO, LIMIT, BenchCase, Mix, cases_of, fastest, short_name
from partsong.evals.bench.models import BENCH_MODELS, WIDE_MODELS, BenchModel
from partsong.evals.bench.peers import cpu_shims
from partsong.foreign_messages import quiet_libraries
from partsong.ledger import Ledger
from partsong.parallel import AXES, Mesh
from partsong.parallel.ranks.collectives import agree
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.ranges import named_range
from partsong.samplers.registry import parse_strategy

__all__ = ["run"]

#: Untimed steps; the first waits for fresh keys, from the second on exchanges are asynchronous and use `wire`.
STEPS_BEFORE = 2
#: The time of the step that is traced, after all that are timed.
LAST = 0.01


def run(
    *,
    nproc: int = 2,
    repeats: int = 5,
    models: Sequence[str] = tuple(BENCH_MODELS),
    tokens: Sequence[int] = (1024, 4096),
    peers: bool = True,
    profile: Path | None = None,
    strategies: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Times all cases and returns a row per model, size and case.

    Args:
        nproc: ranks, one thread each.
        repeats: rounds; the median counts.
        models: names of `BENCH_MODELS`, or of `WIDE_MODELS` on GPUs.
        tokens: numbers of image tokens, to which 128 text tokens are added.
        peers: whether to time diffusers' own context parallelism too.
        profile: a folder for Chrome traces of one more step of every case on the first rank, a file for each model and
            size; None writes none.
        strategies: what to time instead of the usual mixes, as on a command line, with ``+`` between several; ``auto``
            is the exact mix that the planner predicts to be fastest on this machine.
        beside: strategies without ranks that every case has, serial ones too; those of other libraries have none.

    Raises:
        ArgumentError: a strategy is unknown, or ``auto`` is asked for on a machine that was not measured.
    """
    # Parsed here as well, so that unknown names are refused before any rank is started.
    given = {name: tuple(map(parse_strategy, name.split("+"))) for name in strategies if name != AUTO}
    mixes = {
        (model, count): {name: given[name] if name in given else fastest(model, count, nproc) for name in strategies}
        for model in models
        for count in tokens
    }
    more = tuple(map(parse_strategy, beside))
    return launch(_on_rank, nproc, nproc, repeats, tuple(models), tuple(tokens), peers, profile, mixes, more)


def _on_rank(
    nproc: int,
    repeats: int,
    models: tuple[str, ...],
    tokens: tuple[int, ...],
    peers: bool,
    profile: Path | None,
    mixes: Mapping[tuple[str, int], Mapping[str, Mix]],
    beside: Mix,
) -> list[dict[str, Any]]:
    quiet_libraries()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    # The first mesh starts the process group, which the meshes of the strategies share, and so must end last.
    with Mesh(ulysses=nproc) as mesh, torch.inference_mode(), cpu_shims(mesh.device.type):
        for model in models:
            torch.manual_seed(0)
            row = (BENCH_MODELS | WIDE_MODELS)[model]
            dtype = torch.float32 if is_on_host(mesh.device) else row.dtype
            with torch.inference_mode(False):  # as users load them; tensors of inference mode do not record writes
                module = row.build().to(mesh.device, dtype).eval()
            # Where ranks share a GPU, gloo carries the messages, and diffusers' own do not go through it.
            has_peers = peers and row.peers and (is_on_host(mesh.device) or dist.get_backend() != "gloo")
            for count in tokens:
                named = mixes[model, count] or {" + ".join(map(short_name, mix)): mix for mix in row.mixes}
                cases = cases_of(named, module, nproc, has_peers, beside)
                inputs = partial(_inputs, row, count, mesh.device, dtype)
                _rounds(cases, inputs, repeats, mesh)
                if profile is not None:
                    _trace(cases, inputs(LAST), mesh, profile / f"{model}-{count}.json")
                rows += [_row(model, count, case, cases[0], mesh) for case in cases]
    return rows


def _inputs(row: BenchModel, count: int, device: torch.device, dtype: torch.dtype, time: float) -> dict[str, Any]:
    """Makes the arguments of a step on a device; times stay as exact as they are."""
    given = row.inputs(count, time)
    return {name: value.to(device, None if name == "timestep" else dtype) for name, value in given.items()}


def _rounds(cases: list[BenchCase], inputs: Callable[[float], dict[str, Any]], repeats: int, mesh: Mesh) -> None:
    """Runs all cases in turn at falling timesteps; the first steps are not timed."""
    for step in range(STEPS_BEFORE + repeats):
        named = inputs(0.6 - 0.02 * step)
        for case in cases:
            seconds, waited, exposed, cpu = _step(case, named, mesh)
            if step >= STEPS_BEFORE:
                case.seconds.append(seconds)
                case.waiting.append(waited)
                case.exposed.append(exposed)
                case.cpu.append(cpu)


def _trace(cases: list[BenchCase], named: dict[str, Any], mesh: Mesh, path: Path) -> None:
    """Traces the first rank in one more step of every case, each as a range of its name."""
    kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profiler.profile(activities=kinds) if mesh.is_main else nullcontext() as trace:
        for case in cases:
            with named_range(case.name):
                _step(case, named, mesh)
    if trace is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))


def _step(case: BenchCase, named: dict[str, Any], mesh: Mesh) -> tuple[float, float, float, float]:
    """Runs one step of a case and returns the slowest rank's wall time, the longest and the least wait, and CPU time.

    The rank that waits longest had the faster core. The least wait is the cost of the exchange itself.
    """
    everyone = mesh.axis(*AXES)
    _synchronise(mesh)
    agree(everyone, [0.0])
    start, spent, waited = time.perf_counter(), time.process_time(), 0.0
    if case.everyone or mesh.is_main:
        with Ledger(flops=False) as ledger:
            output = case.module(**named, return_dict=False)[0]
            waited, case.sent = ledger.summary()["seconds_waiting"], int(ledger.summary()["bytes_sent"])
        if not case.seconds:
            case.first = output
    _synchronise(mesh)
    mine, spent = time.perf_counter() - start, time.process_time() - spent
    table = agree(everyone, [mine, waited, spent])
    used = table if case.everyone else table[:1]
    waits = [row[1] for row in used]
    return max(row[0] for row in used), max(waits), min(waits), sum(row[2] for row in used)


def _synchronise(mesh: Mesh) -> None:
    """Waits for the device, whose host runs ahead."""
    synchronize(mesh.device)


def _row(model: str, count: int, case: BenchCase, serial: BenchCase, mesh: Mesh) -> dict[str, Any]:
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
