"""Runs attention that distinguishes stacked guidance branches, on a rank that has only part of the batch.

Perturbed-attention guidance (arXiv 2403.17377) stacks two or three branches in one batch, and its attention treats the
last one differently. On part of the batch it would cut in the wrong places. Its result for a branch depends only on
that branch, so a rank gives it copies of its samples, one for each branch, and keeps the copy for the right branch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["branches_apart", "has_stacked_branches"]

#: Processors that cut their batch into branches, and into how many.
_STACKED = {
    "PAGIdentitySelfAttnProcessor2_0": 2,
    "PAGCFGIdentitySelfAttnProcessor2_0": 3,
    "PAGJointAttnProcessor2_0": 2,
    "PAGCFGJointAttnProcessor2_0": 3,
    "PAGHunyuanAttnProcessor2_0": 2,
    "PAGCFGHunyuanAttnProcessor2_0": 3,
    "PAGIdentitySanaLinearAttnProcessor2_0": 2,
    "PAGCFGSanaLinearAttnProcessor2_0": 3,
}


def has_stacked_branches(module: nn.Module) -> bool:
    """Says whether an attention in a model tells branches apart by their place in the batch."""
    processors = (getattr(attention, "processor", None) for attention in module.modules())
    return any(isinstance(each, _Apart) or type(each).__name__ in _STACKED for each in processors)


@contextmanager
def branches_apart(module: nn.Module, rows: slice, total: int) -> Iterator[None]:
    """Lets processors that distinguish branches treat some samples of a batch as they would in the whole batch.

    A pipeline sets such processors when it is called, so they are looked for in each call, and put back after it.

    Args:
        module: the denoiser.
        rows: the samples of this rank.
        total: samples of the whole batch, branch after branch.
    """
    stacked = [
        (attention, processor, _STACKED[type(processor).__name__])
        for attention in module.modules()
        if type(processor := getattr(attention, "processor", None)).__name__ in _STACKED
    ]
    for attention, processor, branches in stacked:
        owners = [sample * branches // total for sample in range(rows.start, rows.stop)]
        vars(attention)["processor"] = _Apart(processor, owners, branches)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for attention, processor, _ in stacked:
            vars(attention)["processor"] = processor


class _Apart:
    def __init__(self, processor: Callable[..., Any], owners: Sequence[int], branches: int) -> None:
        self.processor, self.owners, self.branches = processor, owners, branches
        # An attention module drops what its processor does not name, and it asks this attribute of the instance.
        self.__call__ = functools.update_wrapper(functools.partial(type(self).__call__, self), processor.__call__)

    def __call__(self, attention: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        of_branch = [self._branch(branch, attention, hidden_states, args, kwargs) for branch in sorted({*self.owners})]
        if isinstance(of_branch[0], tuple):
            return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*of_branch, strict=True))
        return torch.cat(of_branch)

    def _branch(self, branch: int, attention: Any, hidden_states: Tensor, args: Any, kwargs: Any) -> Any:
        # Frames or places of a picture may be folded into the batch, within each sample.
        rows = len(hidden_states)
        fold = rows // len(self.owners)
        start, own = self.owners.index(branch) * fold, self.owners.count(branch) * fold

        def copies(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim > 1 and len(value) == rows:
                return torch.cat([value[start : start + own]] * self.branches)
            return value

        others = {name: copies(value) for name, value in kwargs.items()}
        output = self.processor(attention, copies(hidden_states), *map(copies, args), **others)
        keep = slice(branch * own, (branch + 1) * own)
        return tuple(None if x is None else x[keep] for x in output) if isinstance(output, tuple) else output[keep]
