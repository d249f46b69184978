"""Shows a progress bar on rank 0 and stays silent everywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["bar_settings", "progress"]

T = TypeVar("T")
#: Seconds between two lines where there is no terminal.
EVERY = 30.0


@overload
def progress(total: int, desc: str | None = None, enabled: bool | None = None, *, unit: str = "it") -> tqdm[int]: ...
@overload
def progress(
    total: Iterable[T], desc: str | None = None, enabled: bool | None = None, *, unit: str = "it"
) -> tqdm[T]: ...
def progress(
    total: int | Iterable[T], desc: str | None = None, enabled: bool | None = None, *, unit: str = "it"
) -> tqdm[int] | tqdm[T]:
    """Returns a tqdm bar: iterate over it, or use it as a context manager and call its `.update(n)`.

    Args:
        total: number of steps, or the items to go through.
        desc: text in front of the bar.
        enabled: True shows it, False hides it, None shows it where standard error is a terminal, and elsewhere writes a
            line every half minute, the first after as long. On ranks other than 0 (environment variable ``RANK``) it is
            always hidden.
        unit: what is counted.
    """
    from tqdm import tqdm

    items: Any = range(total) if isinstance(total, int) else total
    return tqdm(items, **bar_settings(desc, enabled, unit=unit))


def bar_settings(desc: str | None = None, enabled: bool | None = None, *, unit: str = "it") -> dict[str, Any]:
    """Returns the arguments with which tqdm shows such a bar, for a pipeline's ``set_progress_bar_config``.

    Args:
        desc: as for `progress`, as are the others.
        enabled: see there.
        unit: see there.
    """
    stream = sys.stderr
    hidden = enabled is False or stream is None or os.environ.get("RANK", "0") != "0"
    shown: dict[str, Any] = {"desc": desc, "disable": hidden, "unit": unit}
    if enabled is None and not hidden and stream is not None and not stream.isatty():
        shown |= {"file": _Lines(), "mininterval": EVERY, "maxinterval": EVERY, "delay": EVERY, "leave": False}
        shown["bar_format"] = f"{desc or unit}: " + "{n_fmt} of {total_fmt} after {elapsed}, {remaining} left"
    return shown


class _Lines:
    """Is what a bar writes to where there is no terminal: each state is a line, where a terminal would see it anew."""

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()
