"""Checks options against the bounds in their annotations, and that output files can be written."""

from __future__ import annotations

from typing import Any, get_args

from partsong.errors import ArgumentError
from partsong.knobs import Bound, type_hints
from partsong.outputs import check_writable

__all__ = ["check_bounds", "check_files"]


def check_bounds(options: Any) -> None:
    """Checks every option that is given, and each value of an option that takes several.

    Raises:
        ArgumentError: names the flag, its value and what is allowed.

    Example:
        >>> from partsong.cli.options import Demo
        >>> check_bounds(Demo(nproc=1))
        Traceback (most recent call last):
        partsong.errors.ArgumentError: --nproc 1: use an integer of 2 or more
    """
    for name, hint in type_hints(type(options)).items():
        bounds = [bound for bound in get_args(hint) if isinstance(bound, Bound)]
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            for bound in bounds if value is not None else ():
                if not bound.holds(value):
                    raise ArgumentError(f"--{name.replace('_', '-')} {value}: use {bound}")


def check_files(*paths: str | None) -> None:
    """Checks that files can be written; None stands for no file.

    Raises:
        ArgumentError: a file cannot be written.
    """
    for path in paths:
        if path is not None:
            check_writable(path)
