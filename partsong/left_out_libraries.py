"""Hides installed libraries that other packages would import if present, so that a process starts sooner."""

from __future__ import annotations

import sys
from typing import Any, cast

__all__ = ["leave_out", "left_out"]


def leave_out(*names: str) -> None:
    """Makes libraries look as if they were not installed, for the rest of this process.

    Only the main program may do this, and only before anything has looked for them: diffusers checks only once.

    Args:
        *names: top-level packages; those that are imported already stay.

    Example:
        >>> leave_out("sys")  # imported, so it stays
    """
    for name in names:
        # The import system reads None as "not there", and so does `importlib.util.find_spec`.
        sys.modules.setdefault(name, cast("Any", None))


def left_out() -> list[str]:
    """Returns the libraries that this process has hidden."""
    return [name for name, module in sys.modules.items() if module is None and "." not in name]
