"""``partsong bench``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from partsong.cli.info import env, table
from partsong.cli.options import Bench
from partsong.cli.ranks import under_torchrun
from partsong.errors import ArgumentError

__all__ = ["bench", "summary"]


def bench(options: Bench) -> dict[str, Any]:
    """Runs a benchmark and returns its rows and the hardware they were measured on."""
    for name in ("nproc", "repeats"):
        if getattr(options, name) < 1:
            raise ArgumentError(f"--{name} {getattr(options, name)}: must be 1 or more")
    if under_torchrun():
        raise ArgumentError("partsong bench starts its own ranks; run it without torchrun")
    module = import_module(f"partsong.evals.bench_{options.name}")
    rows = module.run(nproc=options.nproc, repeats=options.repeats)
    machine = env()
    hardware = {name: machine[name] for name in ("system", "cores", "gpus", "python", "packages")}
    return {"command": "bench", "nproc": options.nproc, "name": options.name, "rows": rows, "hardware": hardware}


def summary(result: dict[str, Any]) -> str:
    """The rows as a table with a header."""
    rows = [{name: _short(value) for name, value in row.items()} for row in result["rows"]]
    return table([{name: name for name in rows[0]}, *rows]) if rows else "no rows"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
