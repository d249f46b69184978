"""Lets the tests begin with older libraries: what is made of classes that these lack is left out.

pyproject.toml allows some that the pinned ones are newer than. With the pinned ones nothing here does anything.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import FrameType, ModuleType
from typing import Any, TypeVar

__all__ = ["WORDS", "NotThere", "demand", "fill_in", "is_there", "older", "or_reason", "theirs", "there"]

T = TypeVar("T")
#: The versions from which on every class that the tests name is there.
NEEDED = {"diffusers": (0, 42), "transformers": (5, 23)}


#: How an error of a class that is not there begins.
WORDS = "the installed version has no"


class NotThere(Exception):
    """Says that the installed library has no such class."""


class _Placeholder(type):
    """Is the class of a class that nobody can make."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotThere(f"{WORDS} {cls.__name__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


@functools.cache
def older() -> list[str]:
    """Lists the libraries that are older than the tests would like."""
    return [
        name for name, wanted in NEEDED.items() if tuple(int(part) for part in version(name).split(".")[:2]) < wanted
    ]


def fill_in() -> None:
    """Puts placeholders where a module of the tests imports a class that an older library lacks."""
    for name in older():
        if sys.modules.get(name, name) is None:  # a test forbids it
            continue
        library = __import__(name)
        kind = type(library)
        before: Callable[[Any, str], Any] = kind.__getattr__

        def lookup(self: Any, asked: str, before: Callable[[Any, str], Any] = before) -> Any:
            try:
                return before(self, asked)
            except (AttributeError, RuntimeError):  # RuntimeError where the file of the class cannot be imported
                if asked[:1].isupper() and _asked_by_tests(sys._getframe(1)):
                    return _Placeholder(asked, (), {})
                raise

        kind.__getattr__ = lookup
    if older():
        sys.meta_path.append(_Finder())


def _asked_by_tests(frame: FrameType | None) -> bool:
    """Says whether a module of the tests asks, maybe through the machinery of imports."""
    while frame is not None and "importlib" in str(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("tests.")


def _placeholder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Placeholder(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that an older library lacks, for the tests only; what they hold are placeholders."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in older():
            return None
        return ModuleSpec(fullname, self, is_package=True) if _asked_by_tests(sys._getframe(1)) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = _placeholder
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def is_there(kind: Any) -> bool:
    """Says whether it is no placeholder."""
    return not isinstance(kind, _Placeholder)


def demand(kind: Any) -> None:
    """Raises `NotThere` for a placeholder."""
    if not is_there(kind):
        kind()


def or_reason(make: Callable[[], T]) -> T | str:
    """Returns what `make` does, or which class it lacks: for one case among many of a rank."""
    try:
        return make()
    except NotThere as error:
        return str(error)


def theirs(make: Callable[[], T]) -> T:
    """Returns what `make` does without partsong: what an older library cannot do by itself is not there."""
    try:
        return make()
    except Exception as error:
        if older() and not isinstance(error, NotThere):
            raise NotThere(f"{WORDS} what this needs: {type(error).__name__}: {error}") from error
        raise


class _Rows(dict[str, T]):
    """Holds rows, and says of those that are left out why they are not among them."""

    left: frozenset[str] = frozenset()

    def __missing__(self, name: str) -> T:
        if name in self.left:
            raise NotThere(f"{WORDS} class for {name}")
        raise KeyError(name)


def there(rows: Mapping[str, T], make: Callable[[T], Any]) -> dict[str, T]:
    """Returns the rows of which the installed libraries have the classes; asking for another one is `NotThere`.

    Args:
        rows: of a table of the tests.
        make: makes what a row describes; called with older libraries only.
    """
    if not older():
        return dict(rows)
    kept = _Rows[T]()
    for name, row in rows.items():
        try:
            make(row)
        except (NotThere, ImportError, TypeError):
            continue
        kept[name] = row
    kept.left = frozenset(rows.keys() - kept.keys())
    return kept
