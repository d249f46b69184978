"""Decides the tokens of a picture in groups: every group with one forward, in which its questions see each other.

A token of a group is drawn without knowing the others of its group, so a picture is only as good as they are
independent, given the known tokens. The order ensures that; see `apart_order`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import ArgumentError
from partsong.kernels.place_draw import draw_places
from partsong.samplers.any_order.model import PictureModel

__all__ = ["decode_groups", "row_keys"]


@torch.no_grad()
def decode_groups(
    model: PictureModel,
    order: Tensor,
    sizes: Sequence[int],
    *,
    mutual: bool = True,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Decides the tokens of pictures, group after group.

    The noise of a token is a function of (seed, row, place). So groups of one give the tokens of `decode_any_order`
    with one token per forward.

    Args:
        model: with a caption for each picture.
        order: int64 `[B, L]`, the places of each picture in the order in which they are decided.
        sizes: of the groups; they add up to L.
        mutual: whether the questions of a group see each other.
        temperature: of the draws; 0 takes the likeliest tokens.
        seed: of the noise.

    Returns:
        int64 `[B, L]`, row after row.

    Raises:
        ArgumentError: sizes that do not fit the order, or an order that is not a permutation.
        NotANumberError: the model's logits are no numbers.

    Source: locality-aware parallel decoding, arXiv 2507.01957.
    """
    if sum(sizes) != order.shape[1] or min(sizes) < 1:
        raise ArgumentError(f"groups of {list(sizes)} tokens do not divide an order of {order.shape[1]}")
    if not torch.equal(order.sort(1).values, torch.arange(order.shape[1], device=order.device).expand_as(order)):
        raise ArgumentError("an order names every place of its row once")
    reader, keys = model.reader(), row_keys(seed, order)
    tokens, known = torch.zeros_like(order), order[:, :0]
    for places in order.split(list(sizes), 1):
        logits = reader.ask(tokens.gather(1, known), known, places, mutual=mutual)
        tokens.scatter_(1, places, draw_places(logits, places, keys, temperature))
        known = places
    return tokens


def row_keys(seed: int, order: Tensor) -> Tensor:
    """Derives the key of each row's noise, the 64 bits as int64 `[B]`."""
    keys = [seeds.derive(seed, "row", row) for row in range(len(order))]
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    return torch.tensor(signed, dtype=torch.int64, device=order.device)
