"""``partsong bench``."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from partsong.cli.info import env, table
from partsong.cli.options import Bench
from partsong.cli.ranks import under_torchrun
from partsong.errors import ArgumentError

__all__ = ["bench", "summary"]

#: Columns that repeat what `name` says.
HIDDEN = ("model", "case")


def bench(options: Bench) -> dict[str, Any]:
    """Runs a benchmark and returns its rows and the hardware they were measured on."""
    for name in ("nproc", "repeats"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name} {getattr(options, name)}: must be 1 or more")
    if under_torchrun():
        raise ArgumentError("partsong bench starts its own ranks; run it without torchrun")
    if not options.tokens or min(options.tokens) < 1:
        raise ArgumentError(f"--tokens {' '.join(map(str, options.tokens))}: give one or more positive numbers")
    from partsong.evals.bench_models import BENCH_MODELS

    for model in options.models:
        if model not in BENCH_MODELS:
            raise ArgumentError(f"no benchmark model {model!r}; there are {', '.join(BENCH_MODELS)}")
    start = time.perf_counter()
    module = import_module(f"partsong.evals.bench_{options.name}")
    models = options.models or tuple(BENCH_MODELS)
    rows = module.run(nproc=options.nproc, repeats=options.repeats, models=models, tokens=options.tokens)
    seconds = time.perf_counter() - start
    machine = env()
    hardware = {name: machine[name] for name in ("system", "cores", "gpus", "python", "packages")}
    what = {"command": "bench", "name": options.name, "nproc": options.nproc, "repeats": options.repeats}
    return {**what, "seconds": seconds, "rows": rows, "hardware": hardware}


def summary(result: dict[str, Any]) -> str:
    """The rows as a table with a header."""
    rows = [
        {name: _short(value) for name, value in row.items() if name not in HIDDEN and not isinstance(value, list)}
        for row in result["rows"]
    ]
    return table([{name: name for name in rows[0]}, *rows]) if rows else "no rows"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
