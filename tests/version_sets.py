"""Reads the sets of versions that the tests run with, and skips what is true of the pinned ones only."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.documents import ROOT

__all__ = ["SETS", "pins", "skip_unless_pinned"]

#: Sets of versions that the tests run with, each with its file.
SETS = {"oldest": "constraints-oldest.txt", "pinned": "constraints.txt", "newest": "constraints-newest.txt"}


def pins(file: str) -> dict[str, str]:
    """The version of each package in a file of constraints."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def skip_unless_pinned(*packages: str) -> None:
    """Skips a test of what was written with the pinned versions of some packages, where others are installed."""
    pinned = pins(SETS["pinned"])
    for name in packages:
        if (found := version(name).partition("+")[0]) != pinned[name]:
            pytest.skip(f"it is of {name} {pinned[name]}, and {found} is installed")
