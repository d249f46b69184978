"""Compiles what a plan's blocks compute between two exchanges."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from partsong.accelerator import is_on_host
from partsong.errors import ArgumentTypeError, UnsupportedError
from partsong.parallel.hooks.model_hooks import AttentionHook
from partsong.parallel.hooks.redirect import compiled_operator
from partsong.parallel.plan.plan import Plan

__all__ = ["capture"]


def capture(plan: Plan, *, graphs: bool = False, backend: str = "inductor") -> None:
    """Compiles the repeated blocks of a plan's models, up to each exchange and on from it, until the plan is undone.

    The first call afterwards runs as it is, the second one compiles, and each new size compiles once more. Compiled
    code adds up in another order, so outputs differ from those of an uncompiled plan by rounding. Blocks that were
    compiled before stay as they are.

    Args:
        plan: what `partsong.parallelize` returned.
        graphs: records each piece as a CUDA graph, too, which a host starts as one kernel. Only for exact strategies:
            the others keep tensors from step to step, whose memory the next graph would write to.
        backend: what ``torch.compile`` hands its graphs to.

    Raises:
        ArgumentTypeError: not a plan.
        UnsupportedError: a model has no lists of blocks; graphs without CUDA, or under a strategy that is not exact.

    Example:
        >>> import partsong
        >>> with partsong.load_pipeline("shapes") as plan:
        ...     partsong.capture(plan, backend="eager")
    """
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(f"capture() takes what parallelize() returned, not {type(plan).__name__}")
    plan.check_attached()
    if graphs:
        _check_graphs(plan)
    blocks = [block for denoiser in plan.denoisers for block in _blocks_of(denoiser.module)]
    plan.apply(partial(_compile, plan, blocks, backend, "reduce-overhead" if graphs else None))


def _compile(plan: Plan, blocks: list[nn.Module], backend: str, mode: str | None) -> None:
    if hooks := plan.hooks_of(AttentionHook):
        plan.on_take_off(compiled_operator())
    for hook in hooks:
        hook.pause_at_attention()
    for block in blocks:
        block.compile(backend=backend, mode=mode)
        plan.on_take_off(partial(setattr, block, "_compiled_call_impl", None))


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    names = getattr(module, "_repeated_blocks", None) or ()
    blocks = [part for part in module.modules() if type(part).__name__ in names]
    # Some models do not say; their blocks stand in lists of their own.
    blocks = blocks or [part for each in module.children() if isinstance(each, nn.ModuleList) for part in each]
    if not blocks:
        raise UnsupportedError(
            f"{type(module).__name__} has no lists of blocks, so capture() does not know what to compile; call "
            "compile() on its parts yourself, before or after parallelize()"
        )
    return [block for block in blocks if block._compiled_call_impl is None]


def _check_graphs(plan: Plan) -> None:
    device: Any = plan.mesh.device
    if is_on_host(device) or device.type != "cuda":
        raise UnsupportedError(f"capture(graphs=True) records CUDA graphs, and this plan computes on {device.type}")
    if plan.kind != "exact":
        names = " and ".join(type(strategy).__name__ for strategy in plan.strategies)
        raise UnsupportedError(
            f"capture(graphs=True) is for exact strategies, and under {names} blocks keep tensors from step to step; "
            "leave graphs out"
        )
