"""Reads the traces that come with the package as they are filed, and says whether they are read here."""

from __future__ import annotations

import json
import lzma
from typing import Any

import pytest

from partsong.planner.shipped_traces import FOLDER, versions

__all__ = ["file_of", "skip_other_versions"]


def file_of(name: str) -> dict[str, Any]:
    """The file of a published model."""
    return json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))


def skip_other_versions(name: str) -> None:
    """Skips a test where the file of a published model is of other versions than those that are installed."""
    if (shipped := file_of(name)["versions"]) != versions():
        pytest.skip(f"the files are of {shipped}, and are read with these versions only")
