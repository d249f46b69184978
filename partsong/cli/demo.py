"""Runs ``partsong demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.cli.bounds import check_files
from partsong.cli.options import Demo
from partsong.cli.ranks import prepare_ranks, refuse_torchrun, run_on_ranks
from partsong.jobs.machine import describe_machine
from partsong.jobs.pipeline_source import find_pipeline
from partsong.seeds import check_seed

if TYPE_CHECKING:
    from partsong.jobs.demo import Method

__all__ = ["demo", "summary"]


def demo(options: Demo) -> dict[str, Any]:
    """Samples, writes the page and returns the measured rows."""
    _check(options)
    source = find_pipeline("shapes")
    prepare_ranks(options.nproc, "partsong.jobs.demo")
    from partsong.jobs.demo import DemoJob, methods_for, run_demo
    from partsong.jobs.demo_page import render_page, render_sheet

    job = DemoJob(
        model=source.zoo_name or "shapes",
        methods=methods_for(options.nproc),
        nproc=options.nproc,
        seed=options.seed,
        steps=options.steps,
        repeats=options.repeats,
    )
    calls = (len(job.methods) + 1) * job.repeats
    print(
        f"sampling {len(job.captions)} captions {calls} times on {job.nproc} ranks: {', '.join(job.methods)}",
        flush=True,
    )
    start = time.perf_counter()
    methods = run_on_ranks(run_demo, options.nproc, job)
    seconds = time.perf_counter() - start
    out = Path(options.out).resolve()
    out.write_text(render_page(job, methods, _hardware()), encoding="utf-8")
    if options.picture is not None:
        render_sheet(job, methods).save(options.picture, format="PNG", optimize=True)
    return {
        "command": "demo",
        "strategy": list(job.methods),
        "nproc": job.nproc,
        "seed": job.seed,
        "seconds": seconds,
        "out": out,
        "rows": [_row(method) for method in methods],
    }


def summary(result: dict[str, Any]) -> str:
    """Says where the page is."""
    return f"open this page in a browser: {result['out']}"


def _row(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "class": method.kind,
        "seconds": method.seconds,
        "speedup": method.speedup,
        "psnr_to_serial": method.psnr,
        "psnr_to_serial_worst": method.psnr_worst,
        "max_abs_diff": method.max_abs_diff,
        "facts_read": sum(sum(f.values()) for f in method.facts) / sum(len(f) for f in method.facts),
        "bytes_sent": method.bytes_sent,
    }


def _check(options: Demo) -> None:
    refuse_torchrun("partsong demo starts its own ranks")
    check_seed(options.seed)
    check_files(options.out, options.picture)


def _hardware() -> str:
    machine = describe_machine()
    devices = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['system']}, {machine['cores']} cores, {devices}, torch {machine['packages']['torch']}"
