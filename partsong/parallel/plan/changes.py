"""Runs a user's calls that change layers of a pipeline, such as loading a LoRA, on the models without hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from partsong.errors import PartsongError, UnsupportedError
from partsong.parallel.hooks.replaced_method import Around, Method, ReplacedMethods

__all__ = ["Renewal", "watch_changes", "without_model_offload"]

#: Methods of diffusers' pipelines and models that add something to layers, or remove it.
_CHANGING = (
    *("load_lora_weights", "unload_lora_weights", "load_lora_adapter", "add_adapter", "delete_adapters"),
    *("fuse_lora", "unfuse_lora", "load_ip_adapter", "unload_ip_adapter"),
    *("fuse_qkv_projections", "unfuse_qkv_projections", "enable_freeu", "disable_freeu"),
    *("enable_cache", "disable_cache", "enable_layerwise_casting"),
    *("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"),
    *("remove_all_hooks", "reset_device_map"),
)
#: Those that load an adapter, which may be for another model.
_LOADING = ("load_lora_weights", "load_lora_adapter")


@dataclass(frozen=True, slots=True)
class Renewal:
    """Holds how a plan is taken off while a user changes the models.

    Attributes:
        take_off: takes every hook off.
        put_on: puts the hooks on the changed models.
        refuses: says why a method must not be called with some arguments under the plan; None where it may.
        is_ending: says whether the pipeline's call is cleaning up.
    """

    take_off: Callable[[], None]
    put_on: Callable[[], None]
    refuses: Callable[[str, tuple[Any, ...]], str | None]
    is_ending: Callable[[], bool]


def watch_changes(renewal: Renewal, owners: list[Any], methods: ReplacedMethods) -> None:
    """Runs methods that change layers without a plan's hooks, which are put on again afterwards.

    So the order of calls does not matter: an adapter loaded under a plan works as if it had been loaded before.

    Args:
        renewal: takes the plan off and puts it on.
        owners: a pipeline and its models.
        methods: takes the replaced methods.
    """
    for owner in owners:
        for name in _CHANGING:
            if hasattr(type(owner), name):
                methods.replace(owner, name, _renewing(renewal, owner, name))


def _renewing(renewal: Renewal, owner: Any, name: str) -> Around:
    def around(method: Method) -> Method:
        def change(*args: Any, **kwargs: Any) -> Any:
            if renewal.is_ending():  # pipelines renew their own offloading at the end of a call
                return method(*args, **kwargs)
            reason = renewal.refuses(name, (*args, *kwargs.values()))
            if reason is not None:
                raise UnsupportedError(f"{name}(): {reason}")
            renewal.take_off()
            try:
                if name in _LOADING and not kwargs.get("hotswap"):
                    return _loaded(owner, name, lambda: method(*args, **kwargs))
                return method(*args, **kwargs)
            finally:
                _put_on(renewal, name)

        return change

    return around


def _put_on(renewal: Renewal, name: str) -> None:
    try:
        renewal.put_on()
    except PartsongError as problem:
        message = f"{problem}. After {name}() the plan is off: take that back and parallelize() again"
        raise type(problem)(message) from problem


def _loaded(owner: Any, name: str, load: Callable[[], Any]) -> Any:
    """Loads an adapter, and refuses one that fits no layer: diffusers only warns and continues without it."""
    kind, before = type(owner).__name__, _layers(owner)
    try:
        result = load()
    except (KeyError, RuntimeError, TypeError, ValueError) as problem:
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        message = next((line for line in lines if "mismatch" in line), lines[0] if lines else type(problem).__name__)
        message = f"{name}() on {kind}: {message.rstrip('.')}; is the adapter one for another model?"
        raise UnsupportedError(message) from problem
    if _layers(owner) == before:
        raise UnsupportedError(f"{name}() has changed no layer of this {kind}; is the adapter one for another model?")
    return result


def _layers(owner: Any) -> list[nn.Module]:
    parts = [owner] if isinstance(owner, nn.Module) else owner.components.values()
    return [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]


@contextmanager
def without_model_offload(target: Any) -> Iterator[None]:
    """Disables `enable_model_cpu_offload` of a pipeline, and enables it again at the end.

    A pipeline renews its offloading after every call, which removes hooks that were added to its models since. So a
    plan's hooks go inside.
    """
    if not getattr(target, "_all_hooks", None):
        yield
        return
    device = target._offload_device
    target.remove_all_hooks()
    try:
        yield
    finally:
        target.enable_model_cpu_offload(device=device)
