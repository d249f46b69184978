"""Teaches a UNet where each place is and what is there. Importing this module loads torch; only the recipe imports it.

A UNet has no positions of its own. What it knows of them comes from the zeros around its picture and spreads by a place
per convolution, and learning that from pictures alone takes long: a model can draw the right objects and still not know
where a caption wants them. What a caption says of relations moves a picture's error by still less, so the layout of the
clean picture is asked for as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from partsong_zoo.shapes.drawing import coverage
from partsong_zoo.shapes.scenes import COLOURS, Thing

__all__ = ["KINDS", "PositionReadout", "draw_layout"]

#: What can stand at a place: the ground or an object of a colour.
KINDS = 1 + len(COLOURS)


def draw_layout(things: list[Thing], side: int = 8) -> NDArray[np.float32]:
    """Computes which share of every place is ground and which is of each colour: `[KINDS, side, side]`, sums of one.

    Args:
        things: placed objects that do not overlap.
        side: rows and columns of places.
    """
    shares = np.zeros((KINDS, side, side), np.float32)
    for thing in things:
        shares[1 + [*COLOURS].index(thing.colour)] += coverage(thing, side, side)
    shares[0] = np.maximum(1 - shares.sum(axis=0), 0)
    return shares / shares.sum(axis=0)


class PositionReadout(nn.Module):
    """Tells from what the deepest attentions of a UNet see where every place is and what the clean picture has there.

    The read-outs are linear, as queries and keys of attention are, so what they can tell attention can use. They serve
    training only and are no part of the UNet.

    Args:
        unet: a `UNet2DConditionModel` with attention at its deepest level.
        side: rows and columns at that level.

    Example:
        >>> from partsong_zoo.shapes_unet.model import build_unet
        >>> unet = build_unet(width=32, depth=1)
        >>> readout = PositionReadout(unet)
        >>> _ = unet(torch.zeros(2, 4, 16, 16), 0, encoder_hidden_states=torch.zeros(2, 20, 192))
        >>> where, what = readout.losses(torch.ones(2, KINDS, 8, 8) / KINDS)
        >>> bool(where > 0), bool(what > 0)
        (True, True)
    """

    def __init__(self, unet: Any, side: int = 8) -> None:
        super().__init__()
        self.side, self._seen = side, list[Tensor]()
        deepest = (unet.down_blocks[-1], unet.mid_block, unet.up_blocks[0])
        attentions = [attention for block in deepest for attention in block.attentions]
        self.heads = nn.ModuleList(nn.Linear(each.config.in_channels, 2 * side + KINDS) for each in attentions)
        unet.register_forward_pre_hook(lambda *_: self._seen.clear())
        for attention in attentions:
            attention.register_forward_pre_hook(lambda _, inputs: self._seen.append(inputs[0]))

    def losses(self, layout: Tensor) -> tuple[Tensor, Tensor]:
        """Computes two losses of the UNet's last call and forgets that call.

        Args:
            layout: what the clean pictures have at every place, shares `[batch, KINDS, side, side]`.

        Returns:
            The mean cross-entropy of rows and columns, and that of what stands there.
        """
        seen = self._seen[:]
        self._seen.clear()
        places = torch.arange(self.side, device=layout.device)
        target = torch.stack([places[:, None].expand(self.side, self.side), places.expand(self.side, self.side)])
        where, what = list[Tensor](), list[Tensor]()
        for head, features in zip(self.heads, seen, strict=True):
            logits = head(features.float().movedim(1, -1)).movedim(-1, 1)  # [batch, 2 * side + KINDS, side, side]
            both = logits[:, : 2 * self.side].unflatten(1, (2, self.side)).movedim(1, 2)
            where.append(F.cross_entropy(both, target.expand(len(both), 2, self.side, self.side)))
            what.append(F.cross_entropy(logits[:, 2 * self.side :], layout))
        return torch.stack(where).mean(), torch.stack(what).mean()
