"""Counts, while code runs on the CPU, what would cost time on a GPU: waits of the host, uploads and fresh memory.

A GPU's host queues operators and runs ahead. It has to wait where Python asks for a number that an operator computes,
where values decide a shape, and for a copy to or from its own memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import partsong

_ATEN = torch.ops.aten
#: Operators that return a Python number, or a tensor whose shape depends on values.
_WAITING = {
    _ATEN._local_scalar_dense,
    _ATEN.equal,
    _ATEN.is_nonzero,
    _ATEN.item,
    _ATEN.masked_select,
    _ATEN.nonzero,
    _ATEN.unique_dim,
    _ATEN._unique2,
    _ATEN.unique_consecutive,
}
_INDEXED = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}
#: Methods that hand a tensor's values to Python. On the CPU they read memory, and no operator is seen.
_HANDED_OVER: set[Any] = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu}
#: Functions that make a tensor of Python's numbers: with a device, they copy from the host's pageable memory.
_MADE: set[Any] = {torch.tensor, torch.as_tensor, Tensor.new_tensor}

#: Who reads what was begun in the step before.
_LATE = {
    "partsong/parallel/ranks/agreement.py:Comparison.check",
    "partsong/parallel/cuts/same_arguments.py:ExpectedArguments.check",
    "partsong/parallel/step_cache/late_measures.py:_Late._measured",
}
#: Functions that read for others: who called them is told.
_READERS = {"Later.read", "compared.<locals>.read"}

_HOME = Path(partsong.__file__).parent
#: Code that computes, in the place of operators that the model would call without it.
_KERNELS = _HOME / "kernels"


class Operators:
    """Counts operators while it is entered; what is seen is told by the file and function that asked for it.

    Args:
        tile: bytes. Fresh memory is counted where it is larger.

    Attributes:
        waits: what makes the host wait.
        late: numbers that began their way to the host a step before, where it is hardly waited for.
        uploads: tensors that are made of Python's numbers on a device that was named.
        fresh: fresh memory that partsong's own code asks for, without that of its kernels.
    """

    def __init__(self, tile: int) -> None:
        self.tile = tile
        self.waits: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.fresh: Counter[str] = Counter()
        self._modes = (_Dispatched(self._dispatched), _Called(self._called))

    def __enter__(self) -> Operators:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def _dispatched(self, operator: Any, args: Any, output: Any) -> None:
        packet = operator.overloadpacket
        by_flags = packet in _INDEXED and any(_is_flags(index) for index in args[1])
        if packet in _WAITING or by_flags:
            self.waits[f"{packet.__name__} {_caller()[1]}"] += 1
        large = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.nbytes > self.tile]
        if not large:
            return
        held = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in large:
            if leaf.untyped_storage()._cdata not in held:
                path, place = _caller()
                if path.is_relative_to(_HOME) and not path.is_relative_to(_KERNELS):
                    self.fresh[f"{packet.__name__} {place}"] += 1

    def _called(self, function: Any, args: Any, kwargs: Any) -> None:
        if function in _HANDED_OVER:
            place = _caller()[1]
            (self.late if place in _LATE else self.waits)[f"{function.__name__} {place}"] += 1
        if function in _MADE and (kwargs.get("device") is not None or function is Tensor.new_tensor):
            self.uploads[f"{function.__name__} {_caller()[1]}"] += 1


def _is_flags(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _caller() -> tuple[Path, str]:
    """The innermost line that is not torch's and not of this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        passes_on = path == __file__ or "/torch/" in path or name.endswith("__torch_function__") or name in _READERS
        if not passes_on:
            break
        frame = frame.f_back
    assert frame is not None, "a test has called it"
    parts = Path(path).parts
    if "site-packages" in parts:  # an environment may lie in a folder that is called partsong
        parts = parts[parts.index("site-packages") + 1 :]
    start = next((n for n in reversed(range(len(parts))) if parts[n] in ("partsong", "diffusers", "tests")), -1)
    return Path(path), f"{'/'.join(parts[start:])}:{frame.f_code.co_qualname}"


class _Dispatched(TorchDispatchMode):
    def __init__(self, note: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.note(func, args, output)
        return output


class _Called(TorchFunctionMode):
    def __init__(self, note: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
