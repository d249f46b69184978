"""Runs ``partsong bench``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from partsong.cli.options import Bench
from partsong.cli.ranks import refuse_torchrun
from partsong.cli.table import table
from partsong.errors import ArgumentError
from partsong.jobs.load import LoadWatch
from partsong.jobs.machine import describe_hardware

#: Named here instead of imported, because this module must load without torch.
TUNED = "PARTSONG_TUNED"

__all__ = ["bench", "summary"]

#: Columns that only repeat a part of `name`.
HIDDEN = ("model", "case")


def bench(options: Bench) -> dict[str, Any]:
    """Runs a benchmark and returns its rows and the hardware they were measured on."""
    refuse_torchrun("partsong bench starts its own ranks")
    if (options.name == "share") != (options.file is not None):
        raise ArgumentError("partsong bench share takes one file, which `make gpu` wrote; other benchmarks take none")
    if options.file is not None:
        return _shared(options, Path(options.file))
    watch, start = LoadWatch(), time.perf_counter()
    rows = {"image": _image, "kernels": _kernels, "parscale": _parscale}[options.name](options)
    seconds = time.perf_counter() - start
    nproc = (options.nproc or 2) if options.name == "image" else 1
    request = {"command": "bench", "name": options.name, "nproc": nproc, "repeats": options.repeats}
    return {**request, "seconds": seconds, "rows": rows, "hardware": describe_hardware(), **watch.report()}


def _shared(options: Bench, file: Path) -> dict[str, Any]:
    from partsong.evals.gpu.share import share

    _refuse_image_options(options)
    _refuse_tune(options)
    return {**share(file), "command": "bench", "name": options.name}


def _image(options: Bench) -> list[dict[str, Any]]:
    from partsong.evals.bench import image as bench_image
    from partsong.evals.bench.models import BENCH_MODELS

    _refuse_tune(options)
    for model in options.models:
        if model not in BENCH_MODELS:
            raise ArgumentError(f"no benchmark model {model!r}; there are {', '.join(BENCH_MODELS)}")
    models, tokens = options.models or tuple(BENCH_MODELS), options.tokens or (1024, 4096)
    profile = None if options.profile is None else Path(options.profile)
    return bench_image.run(
        nproc=options.nproc or 2,
        repeats=options.repeats,
        models=models,
        tokens=tokens,
        profile=profile,
        strategies=options.strategy,
    )


def _kernels(options: Bench) -> list[dict[str, Any]]:
    from partsong.evals.bench import kernels as bench_kernels

    _refuse_image_options(options)
    if options.tune is not None:
        from partsong.evals.bench.tune_kernels import tune

        tune(Path(options.tune), options.tokens or bench_kernels.GPU_LENGTHS)
        os.environ[TUNED] = options.tune  # the table then uses the new settings
    return bench_kernels.run(repeats=options.repeats, tokens=options.tokens)


def _parscale(options: Bench) -> list[dict[str, Any]]:
    from partsong.evals.bench import parscale as bench_parscale

    _refuse_image_options(options)
    _refuse_tune(options)
    rows = [bench_parscale.run(repeats=options.repeats, prompt=length) for length in options.tokens or (256,)]
    return [row for table_rows in rows for row in table_rows]


def _refuse_tune(options: Bench) -> None:
    if options.tune is not None:
        raise ArgumentError("--tune belongs to partsong bench kernels")


def _refuse_image_options(options: Bench) -> None:
    if options.nproc is not None or options.models or options.profile is not None or options.strategy:
        raise ArgumentError("--nproc, --models, --strategy and --profile belong to partsong bench image")


def summary(result: dict[str, Any]) -> str:
    """Returns the rows as a table with a header, or where they were written to be shared."""
    if result["name"] == "share":
        return (
            f"{result['file']} has {len(result['rows'])} rows and no names, paths or addresses; read it, then share it"
        )
    columns = dict.fromkeys(name for row in result["rows"] for name in row if name not in HIDDEN)
    shown = [name for name in columns if not any(isinstance(row.get(name), list) for row in result["rows"])]
    rows = [{name: _short(row.get(name)) for name in shown} for row in result["rows"]]
    return table([{name: name for name in rows[0]}, *rows]) if rows else "no rows"


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
