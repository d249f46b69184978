"""Checks a row that a caller gives for a model of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from inspect import Parameter

from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.adapters.row import Adapter, places
from partsong.parallel.hooks.model_hooks import signature_of

__all__ = ["given_row"]

#: Fields that name arguments of the model, and those whose keys are paths of modules.
_ARGUMENTS = ("sample", "timestep", "batched", "per_sample", "layered", "padded", "shared", "residuals", "refused")
_PATHS = ("attention", "linear_attention", "gathered", "convolutions", "splits", "gather", "blocks")


def given_row(row: Adapter, module: nn.Module) -> Adapter:
    """Returns a caller's row, whose first calls are compared with those of one rank.

    Args:
        row: what the caller says about the model.
        module: the model.

    Raises:
        ArgumentError: names a field of the row, and what it names that the model does not have.
        UnsupportedError: the row leaves out `splits` or `gather`, and the class has no plan of its own.
    """
    resolved = row if row.whole is not None or row.rows else row.resolved(module)
    for field in _ARGUMENTS:
        _check_names(row.model, field, _asked(row, field), module)
    modules = dict(module.named_modules())
    for field in _PATHS:
        for path in getattr(resolved, field) or ():
            _check_path(row.model, field, path, modules)
    for path, cuts in (resolved.splits or {}).items():
        named = [str(name) for name, cut in cuts.items() if not cut.output]
        for name in places(path, modules, optional=True):
            _check_names(row.model, f"splits[{path!r}]", named, modules[name])
    for path, named in row.blocks.items():
        for block in modules[path].children():
            _check_names(row.model, f"blocks[{path!r}]", named, block)
    return replace(resolved, checked=True)


def _asked(row: Adapter, field: str) -> Iterable[str]:
    """Lists the arguments that a field names, unless it was left at its default."""
    value = getattr(row, field)
    default = next(each.default for each in fields(row) if each.name == field)
    if field != "sample" and default is not MISSING and value == default:
        return ()
    return (value,) if isinstance(value, str) else value


def _check_names(model: str, field: str, names: Iterable[str], module: nn.Module) -> None:
    known = signature_of(module).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
        return
    for name in names:
        if name not in known:
            raise ArgumentError(
                f"adapter for {model}: {field} names the argument {name!r}, and {type(module).__name__} takes "
                f"{', '.join(known)}"
            )


def _check_path(model: str, field: str, path: str, modules: Mapping[str, nn.Module]) -> None:
    try:
        names = places(path, modules, optional=field == "splits")
    except UnsupportedError:
        names = []
    if not names:
        raise ArgumentError(
            f"adapter for {model}: {field} names {path!r}, and there is no such module; there are "
            f"{', '.join(_some(modules))}"
        )


def _some(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields the names of the outer modules, and of those in the first of a list."""
    yield from (name for name in modules if name and (name.count(".") == 0 or (".0" in name and name.count(".") <= 2)))
