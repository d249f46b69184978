"""Shows a progress bar on rank 0 and stays silent everywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress"]

T = TypeVar("T")


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
        enabled: True shows it, False hides it, None shows it where standard error is a terminal. On ranks other than
            0 (environment variable ``RANK``) it is always hidden.
        unit: what is counted.
    """
    from tqdm import tqdm

    if enabled is None:
        enabled = sys.stderr is not None and sys.stderr.isatty()
    hidden = not enabled or os.environ.get("RANK", "0") != "0"
    if isinstance(total, int):
        return tqdm(range(total), desc=desc, disable=hidden, unit=unit)
    return tqdm(total, desc=desc, disable=hidden, unit=unit)
