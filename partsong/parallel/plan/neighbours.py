"""Refuses other changes to a model that no parallel form supports: diffusers' caches, offloaded weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.protocols import Attachment, Cut, Shards
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.strategy import Strategy

__all__ = [
    "Hooked",
    "changes_layers",
    "check_guidance_calls",
    "check_neighbours",
    "hook_of_a_user",
    "refused_change",
]

#: Packages whose hooks on layers know what they do.
_KNOWN_HOOKS = ("partsong", "torch", "accelerate", "diffusers", "peft", "torchao")

#: Caches that compare results with earlier ones: ranks would see different parts of them.
_COMPARING = ("FirstBlockCacheConfig", "SeaCacheConfig")
#: Caches that call the model with half of the batch in some steps.
_HALVING = ("FasterCacheConfig",)
#: Methods that keep weights elsewhere -> their names in messages.
_OFFLOADS = {"enable_sequential_cpu_offload": "sequential offload", "enable_group_offload": "group offload"}


class Hooked(Protocol):
    """Describes a denoiser under a plan."""

    module: nn.Module
    strategies: tuple[Strategy, ...]
    everyone: Axis
    cut: Cut | None
    shards: Shards | None
    attachments: list[Attachment]


def check_neighbours(denoiser: Hooked) -> None:
    """Refuses hooks on a denoiser's layers that do not work with the plan.

    Raises:
        UnsupportedError: names it, says why and what to use.
    """
    config = getattr(denoiser.module, "_cache_config", None)
    reason = None if config is None else _cache_reason(denoiser, config)
    if reason is None and denoiser.shards is not None:
        reason = next((_offload_reason(denoiser, kind) for kind in _offloads(denoiser.module)), None)
        reason = reason or _casting_reason(denoiser)
    if reason is not None:
        raise UnsupportedError(f"{type(denoiser.module).__name__}: {reason}")


def hook_of_a_user(module: nn.Module) -> str | None:
    """Names a user's forward hook on a layer inside a model, and the layer; None where there is none."""
    for name, layer in module.named_modules():
        for hook in (*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()) if name else ():
            function: Any = getattr(hook, "func", hook)
            owner = getattr(function, "__module__", None) or type(function).__module__
            if owner.partition(".")[0] not in _KNOWN_HOOKS:
                called = getattr(function, "__qualname__", type(function).__name__)
                return f"{called} on {name}"
    return None


def check_guidance_calls(module: nn.Module, guider: Any, names: str) -> None:
    """Refuses features that rely on calls for guidance branches being made in the pipeline's order.

    Args:
        module: the denoiser.
        guider: the guidance of a modular pipeline; None where it has none.
        names: the strategies that make these calls at other times.

    Raises:
        UnsupportedError: there is a cache of diffusers, or guidance that changes layers for a call.
    """
    config = getattr(module, "_cache_config", None)
    if config is not None:
        kind = type(config).__name__.removesuffix("Config")
        raise UnsupportedError(
            f"{type(module).__name__}: {kind} counts the calls for each branch of guidance, and the ranks of "
            f"{names} make some of them for each other; call disable_cache() and use StepCache, or drop {names}"
        )
    if changes_layers(guider):
        raise UnsupportedError(
            f"{type(module).__name__}: {type(guider).__name__} changes layers for one of its calls, and {names} makes "
            "calls at other times than the pipeline; use another guider, or a strategy such as Ulysses"
        )


def changes_layers(guider: Any) -> bool:
    """Says whether the guidance of a modular pipeline changes layers for one of its calls."""
    if guider is None:
        return False
    from diffusers.guiders.guider_utils import BaseGuidance  # loaded already, since there is a guider

    return type(guider).prepare_models is not BaseGuidance.prepare_models


def refused_change(denoiser: Hooked, name: str, given: tuple[Any, ...]) -> str | None:
    """Says why a method of diffusers must not be called under a plan; None where it may.

    Args:
        denoiser: a model under the plan.
        name: name of the method.
        given: its arguments.
    """
    if name == "enable_cache" and given:
        return _cache_reason(denoiser, given[0])
    if name == "enable_layerwise_casting" and denoiser.shards is not None and not denoiser.shards.stays_cut:
        return _casting(denoiser)
    if name in _OFFLOADS and denoiser.shards is not None:
        return _offload_reason(denoiser, _OFFLOADS[name])
    return None


def _cache_reason(denoiser: Hooked, config: Any) -> str | None:
    """Says why a cache of diffusers does not work with a plan; None where it does."""
    in_parts = any(each.changes_parts for each in denoiser.strategies) and denoiser.cut is not None
    if denoiser.everyone.size == 1 and not in_parts:
        return None
    kind, names = type(config).__name__.removesuffix("Config"), _names(denoiser)
    looping = [
        type(each).__name__
        for each in denoiser.strategies
        if each.has_loop or each.reads_last_step or each.changes_parts
    ]
    if type(config).__name__ in _COMPARING:
        return (
            f"{kind} decides by what a rank computes, which is not the same on all ranks of {names}; call "
            "disable_cache() and use StepCache, whose ranks decide together"
        )
    if type(config).__name__ in _HALVING:
        return f"{kind} computes half of a batch in some steps, which {names} may have shared out; call disable_cache()"
    if looping:
        return (
            f"{kind} counts on steps that come one after the other, whole, which {looping[0]} changes; call "
            "disable_cache()"
        )
    if any(each.skips_blocks for each in denoiser.attachments):
        return f"{kind} and {names} would both leave out blocks; call disable_cache(), or drop the strategy"
    return None


def _offload_reason(denoiser: Hooked, kind: str) -> str:
    if denoiser.shards is not None and not denoiser.shards.axes:
        return (
            f"{kind} moves weights that {_names(denoiser)} has in the host's memory already; use "
            "enable_model_cpu_offload() for the other parts, or drop either"
        )
    return (
        f"{kind} keeps the whole weights, of which ranks have shares under {_names(denoiser)}; use "
        "enable_model_cpu_offload(), or a strategy whose ranks have whole weights"
    )


def _casting_reason(denoiser: Hooked) -> str | None:
    assert denoiser.shards is not None
    registries = (getattr(module, "_diffusers_hook", None) for module in denoiser.module.modules())
    is_cast = any("layerwise_casting" in registry.hooks for registry in registries if registry is not None)
    return _casting(denoiser) if is_cast and not denoiser.shards.stays_cut else None


def _casting(denoiser: Hooked) -> str:
    return (
        "layerwise casting changes the type of a layer's weights while a block runs, and under "
        f"{_names(denoiser)} those of a block come in one piece and stay as they are; drop either"
    )


def _names(denoiser: Hooked) -> str:
    return " and ".join(type(strategy).__name__ for strategy in denoiser.strategies)


def _offloads(model: nn.Module) -> Iterator[str]:
    """Names the features that move the weights of single layers."""
    for module in model.modules():
        registry: Any = getattr(module, "_diffusers_hook", None)
        if registry is not None and "group_offloading" in registry.hooks:
            yield "group offload"
        for hook in _accelerate_hooks(getattr(module, "_hf_hook", None)):
            if getattr(hook, "offload", False) is True:
                yield "sequential offload"


def _accelerate_hooks(hook: Any) -> list[Any]:
    """Lists accelerate's hooks on a module; one hook may hold several."""
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))
