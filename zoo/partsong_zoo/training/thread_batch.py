"""Turns texts of threads into tensors for training: several texts per row, and none sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.reasoning.threads.layout import ThreadLayout, Tokens, lay_out

__all__ = ["ThreadBatch", "additive_mask", "flex_mask", "pack_threads"]


@dataclass(frozen=True, slots=True)
class ThreadBatch:
    """Holds texts packed into rows.

    Attributes:
        ids: token ids, int64 `[rows, length]`; `pad` where there is no text.
        positions: each token's position in its own text, int64 `[rows, length]`.
        marks: each token's thought embedding, int64 `[rows, length]`; 0 for no embedding.
        mask: who sees whom, bool `[rows, 1, length, length]` over queries and keys, as transformers takes it. Padding
            sees itself, since a softmax over nothing is not a number.
        sources: where each token is predicted, int64 `[rows, length]`: the last token before it that it sees.
        learn: whether the token has a loss, bool `[rows, length]`.
        texts: the number of each token's text, int64 `[rows, length]`; -1 for padding.
    """

    ids: Tensor
    positions: Tensor
    marks: Tensor
    mask: Tensor
    sources: Tensor
    learn: Tensor
    texts: Tensor

    @property
    def num_tokens(self) -> int:
        """Counts the tokens of the texts, without padding."""
        return int((self.texts >= 0).sum())

    def to(self, device: torch.device | str) -> ThreadBatch:
        """Copies the batch to a device."""
        return ThreadBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def pack_threads(trees: Sequence[Tokens], *, length: int | None = None, pad: int = 0) -> ThreadBatch:
    """Lays texts out and packs them into rows, the longest first, each into the first row with room for it.

    A text that `replayed` made trains engines that join by reading again; any other text trains engines that join keys.

    Args:
        trees: the texts, beginning with their prompts.
        length: the length of the rows. Default: that of the longest text.
        pad: the id that fills the rows up.

    Returns:
        The batch, rows in the order in which they were begun.

    Raises:
        ArgumentError: there are no texts, one is longer than a row, or no token can predict a learned token. That is
            so for the first token of a text, and for the first after a fork, where several threads end and none has
            read the others. Put text there that is not learned.

    >>> from partsong.reasoning.threads import Fork, TokenRun
    >>> text = (TokenRun((5,)), Fork(((TokenRun((6,), True),), (TokenRun((7,), True),))), TokenRun((8,)))
    >>> batch = pack_threads([text])
    >>> batch.positions.tolist(), batch.sources.tolist()
    ([[0, 1, 1, 2]], [[0, 0, 0, 2]])
    """
    if not trees:
        raise ArgumentError("a batch needs at least one text")
    rows = [lay_out(tree) for tree in trees]
    longest = max(len(row.tokens) for row in rows)
    length = longest if length is None else length
    if longest > length:
        raise ArgumentError(f"a text of {longest} tokens does not fit into rows of {length}; make rows longer")
    places = _places([len(row.tokens) for row in rows], length)
    shape = (1 + max(row for row, _ in places), length)
    arrays = {name: np.zeros(shape, np.int64) for name in ("positions", "marks", "sources")}
    arrays |= {"ids": np.full(shape, pad, np.int64), "texts": np.full(shape, -1, np.int64)}
    arrays |= {"learn": np.zeros(shape, bool), "mask": np.zeros((shape[0], 1, length, length), bool)}
    arrays["sources"][:] = np.arange(length)
    arrays["mask"][:] = np.eye(length, dtype=bool)
    for number, (text, (row, start)) in enumerate(zip(rows, places, strict=True)):
        here = slice(start, start + len(text.tokens))
        sees = _sees(text)
        arrays["ids"][row, here], arrays["positions"][row, here] = text.tokens, text.positions
        arrays["marks"][row, here], arrays["learn"][row, here] = text.marks, text.learn
        arrays["mask"][row, 0, here, here], arrays["texts"][row, here] = sees, number
        arrays["sources"][row, here] = _predicted_at(text, sees, number) + start
    return ThreadBatch(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _places(lengths: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Finds a row and first column for each text."""
    used: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = next((row for row, count in enumerate(used) if count + lengths[number] <= length), len(used))
        if row == len(used):
            used.append(0)
        places[number] = (row, used[row])
        used[row] += lengths[number]
    return [places[number] for number in range(len(lengths))]


def _sees(text: ThreadLayout) -> np.ndarray:
    count = len(text.tokens)
    sees = np.tri(count, dtype=bool)
    for hidden in text.hidden:
        sees[hidden.query_first : hidden.query_end, hidden.key_first : hidden.key_end] = False
    return sees


def _predicted_at(text: ThreadLayout, sees: np.ndarray, number: int) -> np.ndarray:
    """Finds the last other token each token sees. For a learned token, that one must have seen all the others."""
    count = len(text.tokens)
    before = sees & ~np.eye(count, dtype=bool)
    last = np.where(before.any(1), count - 1 - before[:, ::-1].argmax(1), np.arange(count))
    learned = np.flatnonzero(text.learn)
    complete = before[learned].any(1) & (sees.sum(1)[learned] == sees.sum(1)[last[learned]] + 1)
    if not complete.all():
        place = int(learned[~complete][0])
        raise ArgumentError(
            f"token {place} of text {number} is learned, but no token has seen all that stands before it: a text, and "
            f"what follows a fork, must begin with text that is not learned"
        )
    return last


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Makes the mask that eager attention adds to scores: 0, or the lowest number of a floating dtype."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def flex_mask(mask: Tensor) -> Any:
    """Makes the mask of flex attention, a `BlockMask` that leaves out blocks that no query sees.

    Args:
        mask: bool `[rows, 1, length, length]`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rows, _, queries, keys = mask.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[row, 0, query, key]

    return create_block_mask(sees, rows, None, queries, keys, device=mask.device)
