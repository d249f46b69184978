"""Names ranges of work for profilers; does nothing without one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["named_range"]


def named_range(name: str) -> AbstractContextManager[object]:
    """Shows the work inside as a named range in traces of `torch.profiler`.

    Args:
        name: shown behind ``partsong:``.

    Example:
        >>> with named_range("gather"):
        ...     pass
    """
    # Entered for every message and attention, so it must cost nothing without a profiler.
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.autograd.profiler.record_function(f"partsong: {name}")
