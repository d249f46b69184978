"""Looks up what measuring found best on a GPU: tile sizes and the order of backends, per class of shapes.

``tuned.json`` holds what ``partsong bench kernels --tune`` wrote, by the GPU's name; a file named by the environment
variable PARTSONG_TUNED comes first. Nothing is timed when a program runs, so a cold start costs nothing.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

from partsong.errors import ArgumentError
from partsong.kernels.call import Call

__all__ = ["ENV", "SHIPPED", "shape_class", "tuned"]

ENV = "PARTSONG_TUNED"
SHIPPED = Path(__file__).with_name("tuned.json")


_gpu = functools.cache(torch.cuda.get_device_name)


def shape_class(call: Call) -> str:
    """Names the class a call belongs to: lengths to the next power of two, head size likewise."""
    kind = "full" if call.mask is None else type(call.mask).__name__.lower()
    dtype = str(call.q.dtype).removeprefix("torch.")
    width, rows = call.q.shape[3], call.q.shape[2] * (call.q.shape[1] // call.k.shape[1])
    name = f"{dtype} d{_power(width)} {kind} q{_power(rows)} k{_power(call.num_keys)}"
    name += "" if call.bias is None else " bias"
    return name + (" segments" if len(call.segments) > 1 else "")


def tuned(what: str, call: Call) -> Any:
    """Returns the entry for a call on its GPU, or None.

    Args:
        what: ``attention_triton`` (tile sizes) or ``backends`` (names, fastest first).
        call: the call.
    """
    if not call.q.is_cuda:
        return None
    table = _tables(os.environ.get(ENV)).get(_gpu(call.q.device.index or 0), {}).get(what, {})
    return table.get(shape_class(call)) if table else None


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def _tables(override: str | None) -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(SHIPPED.read_text())
    if override:
        try:
            own = json.loads(Path(override).read_text())
        except (OSError, ValueError) as error:
            raise ArgumentError(f"{ENV}={override}: not a readable JSON file of tuned kernels ({error})") from error
        for gpu, kinds in own.items():
            for what, rows in kinds.items():
                tables.setdefault(gpu, {}).setdefault(what, {}).update(rows)
    return tables
