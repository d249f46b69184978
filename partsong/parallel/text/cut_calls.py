"""Cuts what a layer of a language model is given: by the rows of a call, or by the tokens of its one row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.arguments import ArgumentNames

__all__ = ["LayerCall", "cut_rows", "cut_tokens", "states_of", "with_states"]

#: What a layer is given: by position, and by keyword.
LayerCall = tuple[tuple[Any, ...], dict[str, Any]]

#: What there is for each row, and how many dimensions it has where the first one counts the rows.
_BY_ROW = {"hidden_states": (3,), "attention_mask": (2, 4), "position_ids": (2,), "position_embeddings": (3,)}
_PLAIN = (bool, int, float, str, type(None))


def cut_rows(layer: nn.Module, call: LayerCall, rows: slice, total: int, cache: Any) -> LayerCall:
    """Returns what a layer is given for some of its rows.

    Args:
        layer: whose signature names the arguments.
        call: with `total` rows.
        rows: to take.
        total: rows.
        cache: among the arguments, which stays as it is.

    Raises:
        UnsupportedError: names an argument of which it is not known how it depends on the rows.
    """
    names = _names_of(type(layer))
    named = {name: _rows_of(name, value, rows, total, cache) for name, value in names.of(*call).items()}
    return names.passed(named, names.positions(call[0]))


def cut_tokens(call: LayerCall, tokens: slice, total: int) -> LayerCall:
    """Returns what a layer is given for some tokens of one row: all tensors have the tokens in their second dimension.

    Raises:
        UnsupportedError: a tensor of another form.
    """
    given, named = call
    kept = {name: _tokens_of(value, tokens, total) for name, value in named.items()}
    return tuple(_tokens_of(value, tokens, total) for value in given), kept


def with_states(call: LayerCall, states: Tensor) -> LayerCall:
    """Replaces the states that a layer is given."""
    given, named = call
    return ((states, *given[1:]), named) if given else (given, {**named, "hidden_states": states})


def states_of(call: LayerCall) -> Tensor:
    """Returns the states that a layer is given, the first of its arguments."""
    given, named = call
    return given[0] if given else named["hidden_states"]


@functools.cache
def _names_of(kind: type[nn.Module]) -> ArgumentNames:
    signature = inspect.signature(kind.forward)
    return ArgumentNames(signature.replace(parameters=[*signature.parameters.values()][1:]))


def _rows_of(name: str, value: Any, rows: slice, total: int, cache: Any) -> Any:
    if value is cache or isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(_rows_of(name, each, rows, total, cache) for each in value)
    if isinstance(value, Mapping):
        return {key: _rows_of(f"{name}[{key!r}]", each, rows, total, cache) for key, each in value.items()}
    if not isinstance(value, Tensor) or (name not in _BY_ROW and total in value.shape):
        raise UnsupportedError(f"it is not known how {name} of a layer depends on the rows")
    if name not in _BY_ROW:
        return value
    if value.ndim not in _BY_ROW[name] or len(value) not in (1, total):
        raise UnsupportedError(f"{name} of a layer is {tuple(value.shape)} in a call of {total} rows")
    return value[rows] if len(value) == total else value


def _tokens_of(value: Any, tokens: slice, total: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_tokens_of(each, tokens, total) for each in value)
    if not isinstance(value, Tensor):
        return value
    if value.ndim < 2 or value.shape[:2] != (1, total):
        raise UnsupportedError(f"a layer is given {tuple(value.shape)} in a row of {total} tokens")
    return value[:, tokens]
