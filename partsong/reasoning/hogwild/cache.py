"""Keys and values in blocks that grow where they lie: written once, read by whoever has the block in view.

A key is stored turned by its place in its own block, so it is right wherever the block stands: whoever reads it turns
the query instead (Hogwild! Inference, Rodionov et al., arXiv 2504.06261).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from partsong.reasoning.local.model import LocalModel

__all__ = ["PAGE", "SLAB", "CacheBlock", "BlockStore", "Slab"]

#: Tokens of a page. Each page is one small matrix product; a block wastes half a page on average.
PAGE = 32
#: Pages that are taken from the system at once.
SLAB = 32


class Slab(NamedTuple):
    """Pages that lie together.

    Attributes:
        pages: numbers of those in use.
        keys: `[layers, SLAB, kv_heads, PAGE, head_dim]`.
        values: likewise.
    """

    pages: slice
    keys: Tensor
    values: Tensor


class CacheBlock:
    """A run of tokens whose keys lie together.

    Attributes:
        number: of the block in its store.
        pages: numbers of its pages, in order.
        length: tokens.
    """

    __slots__ = ("length", "number", "pages")

    def __init__(self, number: int) -> None:
        self.number, self.length = number, 0
        self.pages: list[int] = []


class BlockStore:
    """Memory of blocks: pages in slabs that are added and never moved.

    Args:
        model: whose keys and values these are.

    Attributes:
        keys: of each slab, `[layers, pages, kv_heads, PAGE, head_dim]`.
        values: likewise.
        blocks: all of them.
        pages: by page, the block and the place there of its first token.

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
        """A new block without tokens."""
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
        """The pages in use."""
        return [
            Slab(slice(first, min(first + SLAB, len(self.pages))), keys, values)
            for first, keys, values in zip(range(0, len(self.pages), SLAB), self.keys, self.values, strict=True)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._model.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(block.length for block in self.blocks)

    @property
    def num_bytes(self) -> int:
        """Memory taken, unused pages included."""
        return sum(x.numel() * x.itemsize for x in (*self.keys, *self.values))

    def _add_slab(self) -> None:
        model = self._model
        shape = model.layers, SLAB, model.kv_heads, PAGE, model.head_dim
        # Zeros: places nobody wrote are read with weight 0, and 0 * nan is nan.
        both = torch.zeros(2, *shape, dtype=model.dtype, device=model.device)
        self.keys.append(both[0])
        self.values.append(both[1])
