"""Reads tensors, or parts of them, from the safetensors files of one model."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.parallel.ranks.pieces import WeightPiece

__all__ = ["BYTES_UNTIL_CLOSED", "WeightFiles"]

#: Files are mapped into memory, and what was read counts as this process's memory until they are closed.
BYTES_UNTIL_CLOSED = 16 << 20


#: Diffusers' name of the file with a model's weights.
_USUAL = "diffusion_pytorch_model.safetensors"


class WeightFiles:
    """Reads from the weights in a folder; use it as a context manager.

    Args:
        folder: the folder of one model, such as a pipeline's ``transformer``.

    Attributes:
        names: the file of every tensor.

    Raises:
        ArgumentError: the folder holds no safetensors files, or one cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = _files_of(folder)
        self._open: dict[str, Any] = {}
        self._stack, self._read = ExitStack(), 0

    def read(self, name: str, piece: WeightPiece | None = None) -> Tensor:
        """Returns a tensor in memory of its own, or a part of it.

        Args:
            name: as the file has it.
            piece: which part; None reads all of it.
        """
        mapped = self._slice(name)
        shape, dtype = mapped.get_shape(), _DTYPES.get(mapped.get_dtype())
        runs = ((0, shape[0]),) if piece is None and shape else () if piece is None or piece.dim else piece.runs
        if dtype is None or not runs:
            tensor = _part(mapped, piece)
            del mapped
            self._note(tensor.nbytes)
            return tensor
        # What is mapped counts as memory until the file is closed, so rows are read a stretch at a time.
        del mapped
        tensor, done = torch.empty((sum(count for _, count in runs), *shape[1:]), dtype=dtype), 0
        row = math.prod(shape[1:]) * dtype.itemsize
        rows = max(BYTES_UNTIL_CLOSED // max(row, 1), 1)
        for start, count in runs:
            for first in range(start, start + count, rows):
                stretch = min(rows, start + count - first)
                tensor[done : done + stretch] = self._slice(name)[first : first + stretch]
                done += stretch
                self._note(stretch * row)
        return tensor

    def _slice(self, name: str) -> Any:
        file = self.names[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
        return self._open[file].get_slice(name)

    def _note(self, size: int) -> None:
        self._read += size
        if self._read >= BYTES_UNTIL_CLOSED:
            self.close()

    def most_common_dtype(self) -> torch.dtype:
        """Returns the floating-point type of most tensors."""
        kinds: list[str] = []
        for file in sorted(set(self.names.values())):
            with safe_open(self.folder / file, framework="pt") as opened:
                kinds += [opened.get_slice(name).get_dtype() for name in opened.keys()]  # noqa: SIM118 - no mapping
        floating = [kind for kind in kinds if kind in _DTYPES]
        return _DTYPES[max(set(floating), key=floating.count)] if floating else torch.float32

    def close(self) -> None:
        """Closes the files; `read` opens them again."""
        self._open.clear()
        self._stack.close()
        self._stack, self._read = ExitStack(), 0

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _files_of(folder: Path) -> dict[str, str]:
    """Lists the file of every tensor, from the index where there is one."""
    # Folders may hold variants such as fp16 beside the plain files, whose names have no second dot.
    indices = [path for path in sorted(folder.glob("*.safetensors.index.json")) if path.name.count(".") == 3]
    plain = [path for path in sorted(folder.glob("*.safetensors")) if path.name.count(".") == 1]
    plain = [path for path in plain if path.name == _USUAL] or plain
    try:
        if indices:
            return dict(json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"])
        if len(plain) != 1:
            raise ArgumentError(f"{folder} must hold one safetensors file or an index of several, found {len(plain)}")
        with safe_open(plain[0], framework="pt") as opened:
            return dict.fromkeys(opened.keys(), plain[0].name)
    except (OSError, ValueError, KeyError, SafetensorError) as problem:
        raise ArgumentError(f"the weights in {folder} cannot be read: {problem}") from problem


def _part(mapped: Any, piece: WeightPiece | None) -> Tensor:
    shape = mapped.get_shape()
    if piece is None or not shape:
        return mapped[...].clone()
    if not piece.runs:
        return torch.zeros(shape, dtype=_DTYPES.get(mapped.get_dtype(), torch.float32))
    before = (slice(None),) * piece.dim
    parts = [mapped[(*before, slice(start, start + count))] for start, count in piece.runs]
    return torch.cat(parts, piece.dim) if len(parts) > 1 else parts[0].clone()
