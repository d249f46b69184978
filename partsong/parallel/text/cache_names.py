"""Names the cache among a language model's arguments and results: transformers 5.24 calls it otherwise than before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

__all__ = ["CACHE_NAMES", "cache_name", "given_cache", "result_name", "returned_cache"]

#: The newer name comes first: where a model knows both, the older one is there for older callers.
CACHE_NAMES = ("cache", "past_key_values")
_IN_RESULTS = BaseModelOutputWithPast.__dataclass_fields__


def cache_name(model: nn.Module) -> str:
    """Returns the name by which a model, or a layer of one, takes its cache.

    Where its signature names neither, as wrappers do, it is the name in the results of transformers' own models.
    """
    return _name_of(type(model))


@functools.cache
def _name_of(kind: type[nn.Module]) -> str:
    known = (inspect.signature(kind.forward).parameters, _IN_RESULTS)
    return next(name for names in known for name in CACHE_NAMES if name in names)


def given_cache(named: Mapping[str, Any]) -> Any:
    """Returns the cache among a call's arguments, by whichever name the caller gives it; None for none."""
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)


def result_name(result: Any) -> str:
    """Returns the name of the cache in what a model returns."""
    return next(name for name in CACHE_NAMES if hasattr(result, name))


def returned_cache(result: Any) -> Any:
    """Returns the cache in what a model returns."""
    return getattr(result, result_name(result))
