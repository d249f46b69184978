"""Implements the interface of hooks in diffusers' `HookRegistry`, without importing diffusers, which takes seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

__all__ = ["CallHook"]


class CallHook:
    """Wraps the calls of one module, like diffusers' ``ModelHook``.

    A hook changes the arguments (`pre_forward`), the result (`post_forward`), or has a method ``new_forward`` that
    replaces the call. It keeps no state between calls that diffusers would have to reset.

    Attributes:
        fn_ref: the registry's references to what it replaced, once the hook is on a module.
        uncompiled: name of the method that ``torch.compile`` does not compile; empty for none.
        compiles_inside: whether functions called by that method may be compiled.
    """

    _is_stateful = False
    uncompiled: ClassVar[str] = ""
    compiles_inside: ClassVar[bool] = False

    def __init__(self) -> None:
        self.fn_ref: Any = None

    def check(self, module: nn.Module) -> None:
        """Refuses a module that it cannot be put on; most hooks take any."""

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Prepares the hook for a module that it is put on; the registry calls this first."""
        if self.uncompiled:
            setattr(self, self.uncompiled, MethodType(_uncompiled(type(self)), self))
        return module

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """Does nothing when the hook is taken off a module; the misspelling is diffusers'."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments for the module."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Returns what the caller gets for the module's output."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Does nothing when the module is given up."""
        return module

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Does nothing: there is no state."""
        return module

    def _set_context(self, module: nn.Module, name: str) -> None:
        """Does nothing: there is no state; diffusers 0.40 has it on every hook."""


@functools.cache
def _uncompiled(hook: type[CallHook]) -> Callable[..., Any]:
    """Keeps ``torch.compile`` out of a hook's method; as a decorator this would import torch's compiler at once."""
    disable: Any = torch.compiler.disable
    return disable(getattr(hook, hook.uncompiled), recursive=not hook.compiles_inside)
