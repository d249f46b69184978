"""Ends a script whose ranks fail with one line from each rank, so that the cause is not buried under tracebacks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from partsong.errors import PartsongError

__all__ = ["print_errors_in_a_line"]


def print_errors_in_a_line() -> None:
    """Makes an error of ours that ends the script print one line: the rank, the script's line, what to change.

    Other errors keep their traceback. So does everything where ``PARTSONG_DEBUG`` is set, at Python's prompt, and where
    another library handles uncaught errors already.

    Example:
        >>> print_errors_in_a_line()
    """
    is_script = getattr(sys.modules.get("__main__"), "__file__", None) is not None
    if is_script and "PARTSONG_DEBUG" not in os.environ and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, PartsongError):
        sys.__excepthook__(kind, error, trace)
        return
    script = str(getattr(sys.modules["__main__"], "__file__", ""))
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == script:
            line = trace.tb_lineno
        trace = trace.tb_next
    place = Path(script).name if line is None else f"{Path(script).name}, line {line}"
    # Once ranks are connected, torch calls this and begins each line with the rank itself.
    rank = f"[rank{os.environ['RANK']}]: " if "RANK" in os.environ and sys.excepthook is _print_error else ""
    sys.stderr.write(f"{rank}{place}: {' '.join(str(error).split())}\n")
