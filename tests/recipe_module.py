"""The recipes are scripts in no package: tests load them by their path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong_zoo.training.common import World

RECIPES = Path(__file__).resolve().parent.parent / "zoo" / "recipes"


@contextmanager
def loaded(name: str, folder: Path = RECIPES) -> Iterator[ModuleType]:
    """A recipe as a module, known to `sys.modules` for the time of the block: its dataclasses look themselves up."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]


def assert_refused_before_any_work(recipe: ModuleType, config: Any, message: str) -> None:
    """A run ends in an error that says `message`, and its folder was not even made."""
    with pytest.raises(ArgumentError, match=message):
        recipe.run(config, World("cpu"))
    assert not Path(config.out).exists()
