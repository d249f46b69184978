"""Teaches a UNet where it is, for a recipe. Importing this module loads torch; only the recipe imports it.

A UNet has no positions of its own. What it knows of them comes from the zeros around its picture and spreads by a place
per convolution, and learning that from pictures alone takes long: a model can draw the right objects and still not know
where a caption wants them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PositionReadout"]


class PositionReadout(nn.Module):
    """Tells the row and the column of every place from what the deepest attentions of a UNet see.

    The read-outs are linear, as queries and keys of attention are, so what they can tell attention can use. They serve
    training only and are no part of the UNet.

    Args:
        unet: a `UNet2DConditionModel` with attention at its deepest level.
        side: rows and columns at that level.

    Example:
        >>> from partsong.zoo.shapes_unet.model import build_unet
        >>> unet = build_unet(width=32, depth=1)
        >>> readout = PositionReadout(unet)
        >>> _ = unet(torch.zeros(2, 4, 16, 16), 0, encoder_hidden_states=torch.zeros(2, 20, 192))
        >>> bool(readout.loss() > 0)
        True
    """

    def __init__(self, unet: Any, side: int = 8) -> None:
        super().__init__()
        self.side, self._seen = side, list[Tensor]()
        deepest = (unet.down_blocks[-1], unet.mid_block, unet.up_blocks[0])
        attentions = [attention for block in deepest for attention in block.attentions]
        self.heads = nn.ModuleList(nn.Linear(each.config.in_channels, 2 * side) for each in attentions)
        unet.register_forward_pre_hook(lambda *_: self._seen.clear())
        for attention in attentions:
            attention.register_forward_pre_hook(lambda _, inputs: self._seen.append(inputs[0]))

    def loss(self) -> Tensor:
        """Returns the mean cross-entropy of rows and columns in the UNet's last call, and forgets that call."""
        seen = self._seen[:]
        self._seen.clear()
        places = torch.arange(self.side, device=seen[0].device)
        rows, columns = places[:, None].expand(self.side, self.side), places.expand(self.side, self.side)
        target = torch.stack([rows, columns]).flatten()
        losses = list[Tensor]()
        for head, features in zip(self.heads, seen, strict=True):
            logits = head(features.float().movedim(1, -1).flatten(1, 2))  # [batch, places, 2 * side]
            both = logits.unflatten(-1, (2, self.side)).transpose(1, 2).flatten(1, 2)
            losses.append(F.cross_entropy(both.float().flatten(0, 1), target.repeat(len(both))))
        return torch.stack(losses).mean()
