"""Finds the best tile sizes and order of backends for this GPU, for a file that `partsong.kernels.tuned` reads."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from partsong.errors import UnsupportedError
from partsong.evals.bench.kernels import GPU_LENGTHS, HEAD_SIZES, forced, inputs, timed
from partsong.kernels import Causal, available
from partsong.kernels.backends import triton_attention
from partsong.kernels.backends.triton_attention import Config
from partsong.kernels.call import Call, Segment
from partsong.kernels.tuned import shape_class

__all__ = ["tune"]

CANDIDATES = [
    Config(block_m=m, block_n=n, num_warps=warps, num_stages=stages, tma=tma)
    for m, n, warps, stages, tma in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (False, True))
]
REPEATS = 5


def tune(path: Path, lengths: tuple[int, ...] = GPU_LENGTHS) -> dict[str, Any]:
    """Times every candidate on every class of shapes, and merges the fastest into a JSON file.

    Args:
        path: file to write, ``{gpu: {what: {class: fastest}}}``; entries of other GPUs and classes are kept.
        lengths: of sequences to tune for.

    Raises:
        UnsupportedError: there is no GPU or no Triton.
    """
    ok, reason = triton_attention.usable()
    if not torch.cuda.is_available() or not ok:
        raise UnsupportedError(f"tuning needs a GPU with triton: {'no CUDA device' if ok else reason}")
    table = json.loads(path.read_text()) if path.exists() else {}
    entry = table.setdefault(torch.cuda.get_device_name(), {})
    tiles, order = entry.setdefault("attention_triton", {}), entry.setdefault("backends", {})
    with torch.inference_mode():
        for width, causal, length in itertools.product(HEAD_SIZES, (False, True), lengths):
            q, k, v = inputs("cuda", length, width)
            mask = Causal() if causal else None
            call = Call(q, (Segment(k, v, position=0),), mask, None, width**-0.5)
            name = shape_class(call)
            tiles[name] = asdict(_best_config(call))
            cases = [(row, forced(row, q, k, v, mask)) for row, usable, _ in available() if usable and row != "naive"]
            rows = [r for r in timed(cases, length, REPEATS, "cuda") if r["seconds_median"] is not None]
            order[name] = [row["name"] for row in sorted(rows, key=lambda row: row["seconds_median"])]
            path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return table


def _best_config(call: Call) -> Config:
    def run_with(config: Config) -> Any:
        def run() -> None:
            triton_attention.run(call, config)

        return run

    able = triton_attention.fits_copy_engine(call.segments)
    cases = [(str(index), run_with(config)) for index, config in enumerate(CANDIDATES) if able or not config.tma]
    rows = [row for row in timed(cases, call.num_keys, REPEATS, "cuda") if row["seconds_median"] is not None]
    return CANDIDATES[int(min(rows, key=lambda row: row["seconds_median"])["name"])]
