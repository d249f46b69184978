"""Sends the attention operator of a running module elsewhere, whether the module is compiled or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Redirect", "compiled_operator"]

_OPERATOR = F.scaled_dot_product_attention


class Redirect:
    """Passes calls of ``scaled_dot_product_attention`` to another function, and counts them.

    Args:
        attend: takes the operator's arguments.
        leaves: takes the operator's arguments and says which calls stay as they are; None is none.
        leaves_others: leaves every call but the first as it is.
    """

    def __init__(self, attend: Callable[..., Tensor], leaves: Callable[..., bool] | None, leaves_others: bool) -> None:
        self.attend, self.leaves, self.leaves_others, self.calls = attend, leaves, leaves_others, 0

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Computes one call of the operator."""
        left = self.leaves is not None and self.leaves(*args, **kwargs)
        if left or (self.leaves_others and self.calls > 0):
            return _OPERATOR(*args, **kwargs)
        self.calls += 1
        return self.attend(*args, **kwargs)

    def watching(self) -> TorchFunctionMode:
        """Finds the operator by whatever name a module calls it; ``torch.compile`` cannot see through this."""
        return _Mode(self)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Finds calls by the operator's usual name, inside `compiled_operator`."""
        token = _present.set(self)
        try:
            yield
        finally:
            _present.reset(token)


class _Mode(TorchFunctionMode):
    def __init__(self, redirect: Redirect) -> None:
        super().__init__()
        self.redirect = redirect

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _OPERATOR:
            return self.redirect.take(args, kwargs or {})
        return func(*args, **(kwargs or {}))


_present: ContextVar[Redirect | None] = ContextVar("partsong_redirect", default=None)
_lock = threading.Lock()
#: How many plans have a function in the operator's place, and what stood there before.
_users, _before = 0, _OPERATOR


def compiled_operator() -> Callable[[], None]:
    """Puts a function in the operator's place at which compiled code pauses, and returns what takes it out again.

    Where no redirect is present, as in an autoencoder or in another thread, the function calls the operator.
    """
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = F.scaled_dot_product_attention
            disable: Any = torch.compiler.disable
            F.scaled_dot_product_attention = disable(_redirected)
    return _take_out


def _take_out() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            F.scaled_dot_product_attention = _before


def _redirected(*args: Any, **kwargs: Any) -> Tensor:
    redirect = _present.get()
    return _before(*args, **kwargs) if redirect is None else redirect.take(args, kwargs)
