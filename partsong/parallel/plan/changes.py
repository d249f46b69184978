"""Lets a user's calls that change the layers of a pipeline, such as loading a LoRA, run on the bare models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from partsong.errors import PartsongError, UnsupportedError
from partsong.parallel.hooks.replaced_method import Around, Method, ReplacedMethods

__all__ = ["Renewable", "watch_changes", "without_model_offload"]

#: Methods of diffusers' pipelines and models that put something on layers, or take it off.
_CHANGING = (
    *("load_lora_weights", "unload_lora_weights", "load_lora_adapter", "add_adapter", "delete_adapters"),
    *("fuse_lora", "unfuse_lora", "load_ip_adapter", "unload_ip_adapter"),
    *("fuse_qkv_projections", "unfuse_qkv_projections", "enable_freeu", "disable_freeu"),
    *("enable_cache", "disable_cache", "enable_layerwise_casting"),
    *("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload"),
    *("remove_all_hooks", "reset_device_map"),
)
#: Those of them that read an adapter, which may be another model's.
_LOADING = ("load_lora_weights", "load_lora_adapter")


class Renewable(Protocol):
    """Describes a plan that can be taken off while a user changes what is under it."""

    is_ending: bool

    def refuses_change(self, name: str, given: tuple[Any, ...]) -> str | None:
        """Says why a change cannot be made under this plan; None where it can."""
        ...

    def take_off(self) -> None:
        """Takes every hook off."""
        ...

    def put_on(self) -> None:
        """Puts the hooks on what is there now."""
        ...


def watch_changes(plan: Renewable, owners: list[Any], methods: ReplacedMethods) -> None:
    """Lets the methods that change layers run without the plan's hooks, which are put on anew afterwards.

    So the order of calls does not matter: what is put on a pipeline under a plan works as if it had been there before.

    Args:
        plan: is taken off and put on.
        owners: a pipeline and its models.
        methods: takes the replaced methods.
    """
    for owner in owners:
        for name in _CHANGING:
            if hasattr(type(owner), name):
                methods.replace(owner, name, _renewing(plan, owner, name))


def _renewing(plan: Renewable, owner: Any, name: str) -> Around:
    def around(method: Method) -> Method:
        def change(*args: Any, **kwargs: Any) -> Any:
            if plan.is_ending:  # pipelines put their own offloading on anew at the end of a call
                return method(*args, **kwargs)
            reason = plan.refuses_change(name, (*args, *kwargs.values()))
            if reason is not None:
                raise UnsupportedError(f"{name}(): {reason}")
            plan.take_off()
            try:
                if name in _LOADING and not kwargs.get("hotswap"):
                    return _loaded(owner, name, lambda: method(*args, **kwargs))
                return method(*args, **kwargs)
            finally:
                _put_on(plan, name)

        return change

    return around


def _put_on(plan: Renewable, name: str) -> None:
    try:
        plan.put_on()
    except PartsongError as problem:
        raise type(problem)(f"{problem}. After {name}() the plan is off: take that back and parallelize() again") from None


def _loaded(owner: Any, name: str, load: Callable[[], Any]) -> Any:
    """Loads an adapter, and refuses one that fits no layer: diffusers warns of some, and goes on without them."""
    kind, before = type(owner).__name__, _layers(owner)
    try:
        result = load()
    except (KeyError, RuntimeError, TypeError, ValueError) as problem:
        lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
        said = next((line for line in lines if "mismatch" in line), lines[0] if lines else type(problem).__name__)
        raise UnsupportedError(f"{name}() on {kind}: {said.rstrip('.')}; is the adapter one for another model?") from problem
    if _layers(owner) == before:
        raise UnsupportedError(f"{name}() has changed no layer of this {kind}; is the adapter one for another model?")
    return result


def _layers(owner: Any) -> list[nn.Module]:
    parts = [owner] if isinstance(owner, nn.Module) else owner.components.values()
    return [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]


@contextmanager
def without_model_offload(target: Any) -> Iterator[None]:
    """Takes `enable_model_cpu_offload` off a pipeline, and puts it on again at the end.

    A pipeline puts it on anew after every call, and that takes off whatever has come to its models since. So a plan's
    hooks stand inside.
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
