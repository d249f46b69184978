"""Chooses which blocks of keys each block of queries sees, where a model computes that from the tokens themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError

__all__ = ["BlockRule"]

#: Tokens of a block, in the order in which these models put them.
_SIZE = 64


@dataclass(frozen=True, slots=True, eq=False)
class BlockRule:
    """Lets a block see those next to it, and those that get most of its attention.

    How much a block of keys gets is the softmax over the products of the blocks' mean queries and keys. The most
    attended are taken until together they have the mass that is asked for.

    Args:
        near: bool `[1, 1, R, R]`, which of all R blocks are next to each other.
        mass: share of the attention between means that the chosen blocks have at least.
        size: tokens of a block.

    Source: neighbourhood-adaptive block-level attention (NABLA), arXiv 2507.13546.
    """

    near: Tensor
    mass: float
    size: int = _SIZE

    @classmethod
    def of_call(cls, given: Mapping[str, Any]) -> BlockRule:
        """Reads the rule out of what a pipeline gives the model.

        Raises:
            UnsupportedError: it names another rule.
        """
        kind = given.get("attention_type", "nabla")
        if kind != "nabla" or not {"sta_mask", "P"} <= set(given):
            raise UnsupportedError(
                f"sparse_params: attention_type={kind!r} with {', '.join(sorted(given))}; only nabla's rule, with "
                "sta_mask and P, is known over ranks; use CfgParallel or DataParallel"
            )
        return cls(given["sta_mask"], float(given["P"]))

    def means(self, tokens: Tensor) -> Tensor:
        """Returns the mean of every block: queries or keys `[B, H, L, D]` to `[B, H, L / size, D]`."""
        return tokens.unflatten(2, (-1, self.size)).mean(3)

    def choose(self, queries: Tensor, keys: Tensor, first: int = 0) -> Tensor:
        """Chooses blocks of keys for blocks of queries.

        Args:
            queries: means `[B, H, rows, D]` of consecutive blocks.
            keys: means `[B, Hkv, R, D]` of all blocks.
            first: place of the first block of queries among all blocks.

        Returns:
            bool `[B, H, rows, R]`.
        """
        (batch, heads, rows, dim), blocks = queries.shape, keys.shape[2]
        if queries.is_meta:
            return torch.empty((batch, heads, rows, blocks), dtype=torch.bool, device="meta")
        keys = keys.repeat_interleave(heads // max(keys.shape[1], 1), dim=1)
        weights = torch.softmax(queries @ keys.mT / math.sqrt(dim), dim=-1)
        ordered, places = weights.sort(dim=-1)
        # From the least attended on, blocks are left out while their sum is below what may be missed.
        kept = ordered.cumsum(-1) >= 1 - self.mass
        chosen = torch.zeros_like(kept).scatter_(-1, places, kept)
        return chosen | self.near[:, :, first : first + rows].to(chosen.device)
