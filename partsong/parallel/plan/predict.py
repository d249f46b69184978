"""Predicts from shapes alone what a plan would move on ranks that need not exist."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partsong.errors import UnsupportedError
from partsong.parallel.plan.dry_run import DryRun
from partsong.parallel.plan.explain import Explanation
from partsong.parallel.plan.live_bytes import LiveBytes
from partsong.parallel.plan.memory import Memory
from partsong.parallel.plan.predict_text import predict_text, predict_text_memory
from partsong.parallel.strategy import Strategy
from partsong.parallel.text.plan import is_text_model

__all__ = ["Memory", "predict", "predict_memory"]


def predict(
    module: nn.Module, *strategies: Strategy, ranks: int, shares: Sequence[float] | None = None, **inputs: Any
) -> Explanation:
    """Predicts the bytes a plan would move for one call of a denoiser or a language model, on any number of ranks.

    Args:
        module: a denoiser, or a model of transformers with a head; only the shapes of its weights are used, so it may
            live on the ``meta`` device.
        *strategies: as for `parallelize`.
        ranks: number of ranks to predict for.
        shares: relative speed of each rank, as for `Mesh`. Default: all equal.
        **inputs: the module's arguments for one call, full size; tensors on any device. Some models read values from
            masks, ids or counts to find the length of a sequence; give those with values.

    Returns:
        The prediction for a generation long enough to reach the steady state: `Explanation.bytes_by_step` ends with a
        step in the middle of a generation.

    Raises:
        ArgumentTypeError: `module` is not a module.
        ArgumentError: degrees and ranks do not fit, or the shares are wrong for them.
        UnsupportedError: the architecture or the combination has no correct parallel form, or the model's code needs
            more than shapes.

    Example:
        >>> from diffusers import DiTTransformer2DModel
        >>> from partsong import SyncPatch
        >>> model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1,
        ...     sample_size=8, num_embeds_ada_norm=10)
        >>> latents, labels = torch.zeros(1, 4, 8, 8), torch.zeros(1, dtype=torch.long)
        >>> inputs = {"hidden_states": latents, "timestep": labels, "class_labels": labels}
        >>> explanation = predict(model, SyncPatch(), ranks=2, **inputs)
        >>> len(explanation.bytes_per_step)
        2
    """
    if is_text_model(module):
        _refuse_shares(shares)
        return predict_text(module, strategies, ranks, inputs)
    with DryRun(module, strategies, ranks, inputs, shares=shares) as run:
        for _ in range(run.calls):
            run.call()
        return run.plan.explain()


def predict_memory(
    module: nn.Module,
    *strategies: Strategy,
    ranks: int,
    rank: int = 0,
    shares: Sequence[float] | None = None,
    **inputs: Any,
) -> Memory:
    """Predicts the memory that one rank needs for calls of a denoiser or a language model under a plan.

    It counts tensors: the waste of allocators, the workspace of kernels and torch itself come on top.

    Args:
        module: as for `predict`; with ``use_cache=True`` what a language model keeps includes its keys.
        *strategies: as for `parallelize`.
        ranks: number of ranks to predict for.
        rank: which one; where parts are uneven, the first has the largest part unless there are shares.
        shares: how fast each rank is, as for `Mesh`. Default: all alike.
        **inputs: the module's arguments for one call, full size.

    Raises:
        ArgumentTypeError: `module` is not a module.
        ArgumentError: degrees and ranks do not fit, or the shares are wrong for them.
        UnsupportedError: as for `predict`.

    Example:
        >>> import torch
        >>> from diffusers import DiTTransformer2DModel
        >>> from partsong import Ulysses
        >>> model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1,
        ...     sample_size=8, num_embeds_ada_norm=10)
        >>> latents, labels = torch.zeros(1, 4, 8, 8), torch.zeros(1, dtype=torch.long)
        >>> inputs = {"hidden_states": latents, "timestep": labels, "class_labels": labels}
        >>> alone, both = (predict_memory(model, Ulysses(), ranks=ranks, **inputs) for ranks in (1, 2))
        >>> both.working < alone.working
        True
    """
    if is_text_model(module):
        _refuse_shares(shares)
        return predict_text_memory(module, strategies, ranks, rank, inputs)
    with DryRun(module, strategies, ranks, inputs, rank=rank, shares=shares) as run:
        given = (leaf for leaf in tree_leaves(run.inputs) if isinstance(leaf, Tensor))
        with LiveBytes(itertools.chain(run.state.values(), given)) as live:
            for _ in range(run.calls):
                run.call()
        return Memory(run.weight_bytes(), live.peak, live.now)


def _refuse_shares(shares: Sequence[float] | None) -> None:
    if shares is not None:
        raise UnsupportedError("a language model is shared out evenly; leave shares out")
