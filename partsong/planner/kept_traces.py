"""Keeps traces of published models on disk: the same question need not be traced again."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partsong.calibration_files import cache_folder
from partsong.errors import PartsongError
from partsong.outputs import write_text
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.parallel.strategy import Strategy
from partsong.planner.subject import Subject
from partsong.planner.trace import KERNEL_CHOICES, CallTrace, trace_calls
from partsong.planner.trace_data import TraceTable, data_of

__all__ = ["find_trace", "trace_folder"]

#: Names the folder; traces are not kept where it is empty.
ENV = "PARTSONG_TRACES"
#: A trace depends on what stands in these folders of this package, and on these packages.
_HOUSE = Path(__file__).parents[1]
_SOURCES, _PACKAGES = ("kernels", "parallel", "samplers", "planner"), ("torch", "diffusers", "transformers")
#: What the trace of a file is called in it.
_ONLY = "call"
#: Traces of other versions are deleted once none has been added for this many seconds.
_OLD = 30 * 24 * 3600.0


def trace_folder() -> Path | None:
    """Returns where traces are kept: ``PARTSONG_TRACES``, or a folder of the user's cache; None where they are not."""
    named = os.environ.get(ENV)
    return cache_folder() / "traces" if named is None else Path(named) if named else None


def find_trace(
    subject: Subject,
    strategies: Sequence[Strategy],
    ranks: int,
    inputs: Mapping[str, Any],
    *,
    shapes: RememberedShapes,
    whole: bool,
    fused: bool = True,
) -> CallTrace:
    """Reads a trace that was kept, or traces calls and keeps the result.

    Only models of which all settings are known are kept, under strategies of this package.

    Args:
        subject: the model.
        strategies: as for `trace_calls`.
        ranks: how many there are.
        inputs: the denoiser's arguments for one call, full size.
        shapes: what earlier traces have remembered.
        whole: whether every block is traced.
        fused: whether the ranks are GPUs.

    Raises:
        UnsupportedError: as for `trace_calls`.
    """
    how = {"whole": whole, "fused": fused}
    begin = functools.partial(trace_calls, subject.denoiser, strategies, ranks, inputs, shapes=shapes, **how)
    about, folder = _about(subject, strategies, ranks, inputs, how), trace_folder()
    if about is None or folder is None:
        return begin()
    file = folder / about["version"] / _named(about)
    if (kept := _read(file, about)) is not None:
        return kept
    trace = begin()
    _write(file, {"about": about, **data_of({_ONLY: trace})})
    return trace


def _about(
    subject: Subject, strategies: Sequence[Strategy], ranks: int, inputs: Mapping[str, Any], how: Mapping[str, bool]
) -> dict[str, Any] | None:
    """Returns all that a trace depends on; None where not all of it is known."""
    mix = [f"{type(strategy).__module__} {strategy!r}" for strategy in strategies]
    if subject.settings is None or not all(text.startswith("partsong.") for text in mix):
        return None
    return {
        "version": _version(type(subject.denoiser)),
        "settings": subject.settings,
        "weights": _digest(*(f"{name} {w.dtype} {tuple(w.shape)}" for name, w in subject.denoiser.named_parameters())),
        "mix": mix,
        "ranks": ranks,
        "inputs": repr(tree_map(_described, dict(inputs))),
        **how,
        "cuda": torch.cuda.is_available(),
        "environment": [os.environ.get(name) for name in (*KERNEL_CHOICES, "TRITON_INTERPRET")],
    }


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    numbers = "" if value.is_meta else _digest(repr(value.tolist()))
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device.type} {numbers}"


def _digest(*parts: str | bytes) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part if isinstance(part, bytes) else part.encode())
    return whole.hexdigest()[:32]


@functools.cache
def _version(model: type[nn.Module]) -> str:
    """Returns a digest of all sources that a trace depends on: ours, those of the model, and of the packages below."""
    files = [*_HOUSE.glob("*.py"), *(file for name in _SOURCES for file in (_HOUSE / name).rglob("*.py"))]
    ours = [part for file in sorted(files) for part in (str(file.relative_to(_HOUSE)), file.read_bytes())]
    return _digest(*ours, Path(inspect.getfile(model)).read_bytes(), *map(_installed, _PACKAGES), sys.version)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _named(about: Mapping[str, Any]) -> str:
    return f"{_digest(json.dumps(about, sort_keys=True))}.json"


def _write(file: Path, entry: Mapping[str, Any]) -> None:
    """Writes an entry in one step, so that programs which write the same one at the same time do no harm."""
    try:
        if not file.parent.is_dir():
            _remove_old(file.parents[1])
        write_text(file, json.dumps(entry, separators=(",", ":")) + "\n")
    except (OSError, PartsongError):  # a full or read-only disk: traced again next time
        return


def _remove_old(folder: Path) -> None:
    for other in folder.glob("*/"):
        if time.time() - other.stat().st_mtime > _OLD:
            shutil.rmtree(other, ignore_errors=True)


def _read(file: Path, about: Mapping[str, Any]) -> CallTrace | None:
    """Returns what an entry holds; None where there is none, or none that can be read."""
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        return TraceTable(entry).trace(_ONLY) if entry["about"] == about else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
