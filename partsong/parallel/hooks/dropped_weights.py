"""Takes the weights off layers that another rank computes, until a plan is undone."""

from __future__ import annotations

import torch
from torch import nn

from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.pieces import WeightPiece

__all__ = ["drop_weights"]

#: Nothing of a weight.
_NONE = WeightPiece(0, ((0, 0),))


def drop_weights(layer: nn.Module, hooks: HookSet) -> dict[tuple[nn.Module, str], WeightPiece]:
    """Leaves nothing of a layer's weights but their types, and says which they were."""
    pieces = {}
    for part in layer.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            # Where weights are still to be read, there is nothing to read here.
            device = None if weight.is_meta else weight.device
            empty = torch.empty((0, *weight.shape[1:]), dtype=weight.dtype, device=device)
            hooks.put(part, name, nn.Parameter(empty, requires_grad=False))
            pieces[part, name] = _NONE
    return pieces
