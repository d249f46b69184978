"""Names what runs, for profilers: nothing is done where none is at work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["named_range"]


def named_range(name: str) -> AbstractContextManager[object]:
    """Shows what runs inside as a range of this name in traces of `torch.profiler`.

    Args:
        name: shown behind ``partsong:``.

    Example:
        >>> with named_range("gather"):
        ...     pass
    """
    # Asked for once per message and attention, so it has to cost nothing without a profiler.
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.autograd.profiler.record_function(f"partsong: {name}")
