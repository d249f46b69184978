"""Tells which facts hold where in a clip, and has a transformer in training tell it, too. Importing this loads torch.

What a caption says of two objects moves a clip's error little, so a transformer learns to draw objects long before it
learns whose colour is whose. Asked at every place what the clean clip has there, it learns that sooner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from partsong_zoo.motion.drawing import coverage
from partsong_zoo.motion.world import COLOURS, EXTENT, MOTIONS, SHAPES, SIZES, SPEEDS, Mover

__all__ = ["CHOICES", "KINDS", "LayoutReadout", "draw_layouts"]

#: What is asked about an object, and the answers that there are: its colour, shape, size, motion and speed.
CHOICES = (tuple(COLOURS), SHAPES, tuple(SIZES), tuple(MOTIONS), tuple(SPEEDS))
#: How many answers there are to each of these questions about a place: one more, the ground.
KINDS = tuple(1 + len(choices) for choices in CHOICES)
#: Where the answers to each question begin in `draw_layouts`; the first is the ground.
_FIRST = [sum(KINDS[:kind]) for kind in range(len(KINDS))]
#: Tokens of a latent frame along each side.
SIDE = 4


def _answers(mover: Mover) -> list[int]:
    """Returns the rows of `draw_layouts` that belong to an object."""
    choices = (
        [*COLOURS].index(mover.colour),
        SHAPES.index(mover.shape),
        [*SIZES.values()].index(mover.radius),
        [*MOTIONS].index(mover.motion),
        [*SPEEDS.values()].index(mover.speed),
    )
    return [first + 1 + choice for first, choice in zip(_FIRST, choices, strict=True)]


def draw_layouts(movers: list[Mover], first: int, num: int) -> NDArray[np.float32]:
    """Computes which share of every place of a clip has which facts.

    Args:
        movers: the objects, later ones in front.
        first: number of the first latent frame, at least 1; latent t shows frames 2 t - 1 and 2 t.
        num: how many latent frames.

    Returns:
        Shares `[sum(KINDS), num, 4, 4]`; those of one question have a sum of one.
    """
    frames = np.arange(2 * first - 1, 2 * (first + num) - 1)
    free = np.ones((len(frames), EXTENT, EXTENT), np.float32)

    def shares_of(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        return pixels.reshape(num, 2, SIDE, EXTENT // SIDE, SIDE, EXTENT // SIDE).mean(axis=(1, 3, 5))

    shares = np.zeros((sum(KINDS), num, SIDE, SIDE), np.float32)
    for mover in reversed(movers):
        cover = coverage(mover.shape, mover.radius, mover.centres(frames))
        shares[_answers(mover)] += shares_of(free * cover)
        free = free * (1 - cover)
    shares[_FIRST] = shares_of(free)
    return shares


class LayoutReadout(nn.Module):
    """Tells from the tokens after every block of a transformer what the clean clip has at their places.

    The read-outs are linear. They serve training only and are no part of the transformer.

    Args:
        transformer: a `WanTransformer3DModel` or `SkyReelsV2Transformer3DModel` with patches of 1 x 2 x 2.

    Example:
        >>> from partsong_zoo.motion.model import build_transformer
        >>> transformer = build_transformer(heads=1, depth=2)
        >>> readout = LayoutReadout(transformer)
        >>> _ = transformer(torch.zeros(2, 4, 3, 8, 8), torch.zeros(2), torch.zeros(2, 24, 128))
        >>> bool(readout.loss(torch.ones(2, sum(KINDS), 3, 4, 4)) > 0)
        True
    """

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self._seen = list[Tensor]()
        width = transformer.config.num_attention_heads * transformer.config.attention_head_dim
        self.heads = nn.ModuleList(nn.Linear(width, sum(KINDS)) for _ in transformer.blocks)
        transformer.register_forward_pre_hook(lambda *_: self._seen.clear())
        for block in transformer.blocks:
            block.register_forward_hook(lambda _, inputs, output: self._seen.append(output))

    def loss(self, layouts: Tensor) -> Tensor:
        """Computes the mean cross-entropy of the transformer's last call over questions and blocks; forgets that call.

        Args:
            layouts: shares `[batch, sum(KINDS), latents, 4, 4]`.
        """
        seen = self._seen[:]
        self._seen.clear()
        wanted = layouts.flatten(2).split(KINDS, dim=1)
        losses = list[Tensor]()
        for head, tokens in zip(self.heads, seen, strict=True):
            answers = head(F.layer_norm(tokens.float(), tokens.shape[-1:])).transpose(1, 2).split(KINDS, dim=1)
            losses += [F.cross_entropy(answer, shares) for answer, shares in zip(answers, wanted, strict=True)]
        return torch.stack(losses).mean()
