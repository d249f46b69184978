"""Keeps keys and values in blocks that grow in place: written once, read by all workers with the block in view.

A key is stored rotated by its position in its own block, so it is right wherever the block appears: the reader rotates
the query instead (Hogwild! Inference, Rodionov et al., arXiv 2504.06261).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partsong.reasoning.local.model import LocalModel

__all__ = ["PAGE", "SLAB", "CacheBlock", "BlockStore", "Slab"]

#: How many tokens a page has. Each page is one small matrix product; a block wastes half a page on average.
PAGE = 32
#: How many pages are allocated at once.
SLAB = 32


class Slab(NamedTuple):
    """Holds pages that lie together.

    Attributes:
        pages: the numbers of those in use.
        keys: `[layers, SLAB, kv_heads, PAGE, head_dim]`.
        values: of the same shape.
    """

    pages: slice
    keys: Tensor
    values: Tensor


class CacheBlock:
    """Describes a run of tokens whose keys lie together.

    Attributes:
        number: the number of the block in its store.
        pages: the numbers of its pages, in order.
        length: how many tokens it has.
    """

    __slots__ = ("length", "number", "pages")

    def __init__(self, number: int) -> None:
        self.number, self.length = number, 0
        self.pages: list[int] = []


class BlockStore:
    """Holds the memory of blocks: pages in slabs that are added and never moved.

    Args:
        model: the model whose keys and values these are.

    Attributes:
        keys: the keys of each slab, `[layers, pages, kv_heads, PAGE, head_dim]`.
        values: the values of each slab, of the same shape.
        blocks: all blocks.
        pages: for each page, the number of its block and the place of its first token there.

    >>> from partsong.reasoning.local import LocalEngine
    >>> engine = LocalEngine("lists-ar")
    >>> store = BlockStore(engine.model)
    >>> block = store.block()
    >>> store.extend(block, 33)[-1], block.pages, store.num_tokens
    (32, [0, 1], 33)
    """

    def __init__(self, model: LocalModel) -> None:
        self._model = model
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.blocks: list[CacheBlock] = []
        self.pages: list[tuple[int, int]] = []

    def block(self) -> CacheBlock:
        """Adds a block without tokens."""
        self.blocks.append(CacheBlock(len(self.blocks)))
        return self.blocks[-1]

    def extend(self, block: CacheBlock, count: int) -> list[int]:
        """Makes a block longer; returns where the new tokens lie, as page * `PAGE` + place in it."""
        places = range(block.length, block.length + count)
        while len(block.pages) * PAGE < places.stop:
            if len(self.pages) == len(self.keys) * SLAB:
                self._add_slab()
            block.pages.append(len(self.pages))
            self.pages.append((block.number, (len(block.pages) - 1) * PAGE))
        block.length = places.stop
        return [block.pages[place // PAGE] * PAGE + place % PAGE for place in places]

    def slabs(self) -> list[Slab]:
        """Returns the pages in use, by slab."""
        return [
            Slab(slice(first, min(first + SLAB, len(self.pages))), keys, values)
            for first, keys, values in zip(range(0, len(self.pages), SLAB), self.keys, self.values, strict=True)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of keys and values."""
        return self._model.dtype

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of all blocks."""
        return sum(block.length for block in self.blocks)

    def _add_slab(self) -> None:
        model = self._model
        shape = model.layers, SLAB, model.kv_heads, PAGE, model.head_dim
        # Zeros: unwritten places are read with weight 0, and 0 * nan is nan.
        both = torch.zeros(2, *shape, dtype=model.dtype, device=model.device)
        self.keys.append(both[0])
        self.values.append(both[1])
