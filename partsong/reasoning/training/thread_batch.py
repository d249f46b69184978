"""Texts of threads as tensors for training: several texts per row, and none sees another."""

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
    """Texts packed into rows.

    Attributes:
        ids: token ids, int64 `[rows, length]`; `pad` where there is no text.
        positions: of each token in its own text, int64 `[rows, length]`.
        marks: thought embedding of each token, int64 `[rows, length]`; 0 is none.
        mask: who sees whom, bool `[rows, 1, length, length]` over queries and keys, as transformers takes it. Padding
            sees itself, since a softmax over nothing is no number.
        sources: where each token is predicted, int64 `[rows, length]`: the last token before it that it sees.
        learn: whether training takes its loss at the token, bool `[rows, length]`.
        texts: number of the text each token is of, int64 `[rows, length]`; -1 is padding.
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
        """Tokens of the texts, padding left out."""
        return int((self.texts >= 0).sum())

    def to(self, device: torch.device | str) -> ThreadBatch:
        """The same batch on a device."""
        return ThreadBatch(*(getattr(self, field.name).to(device) for field in fields(self)))


def pack_threads(trees: Sequence[Tokens], *, length: int | None = None, pad: int = 0) -> ThreadBatch:
    """Lays texts out and packs them into rows, the longest first, each into the first row with room for it.

    A text that `replayed` made trains engines that join by reading again, any other one engines that join keys.

    Args:
        trees: the texts, from their prompts on.
        length: of the rows; None is that of the longest text.
        pad: id of what fills the rows up.

    Returns:
        The batch, rows in the order in which they were begun.

    Raises:
        ArgumentError: no texts, one that is longer than a row, or a text with a learned token that nobody predicts:
            the first one, or the first one behind a fork, where several threads end and none has read the others. Put
            given text there.

    >>> from partsong.reasoning.threads import Fork, Run
    >>> text = (Run((5,)), Fork(((Run((6,), True),), (Run((7,), True),))), Run((8,)))
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
    made = {name: np.zeros(shape, np.int64) for name in ("positions", "marks", "sources")}
    made |= {"ids": np.full(shape, pad, np.int64), "texts": np.full(shape, -1, np.int64)}
    made |= {"learn": np.zeros(shape, bool), "mask": np.zeros((shape[0], 1, length, length), bool)}
    made["sources"][:] = np.arange(length)
    made["mask"][:] = np.eye(length, dtype=bool)
    for number, (text, (row, start)) in enumerate(zip(rows, places, strict=True)):
        here = slice(start, start + len(text.tokens))
        sees = _sees(text)
        made["ids"][row, here], made["positions"][row, here] = text.tokens, text.positions
        made["marks"][row, here], made["learn"][row, here] = text.marks, text.learn
        made["mask"][row, 0, here, here], made["texts"][row, here] = sees, number
        made["sources"][row, here] = _predicted_at(text, sees, number) + start
    return ThreadBatch(**{name: torch.from_numpy(array) for name, array in made.items()})


def _places(lengths: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Row and first column of each text."""
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
    """The last other token each token sees; where it is learned, that one must have seen all else that it sees."""
    count = len(text.tokens)
    before = sees & ~np.eye(count, dtype=bool)
    found = np.where(before.any(1), count - 1 - before[:, ::-1].argmax(1), np.arange(count))
    learned = np.flatnonzero(text.learn)
    complete = before[learned].any(1) & (sees.sum(1)[learned] == sees.sum(1)[found[learned]] + 1)
    if not complete.all():
        place = int(learned[~complete][0])
        raise ArgumentError(
            f"token {place} of text {number} is learned, but no token has seen all that stands before it: a text, and "
            f"what follows a fork, must begin with given text"
        )
    return found


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as eager attention adds it to scores: 0 or the lowest number of a floating dtype."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def flex_mask(mask: Tensor) -> Any:
    """The mask as flex attention takes it, a `BlockMask` that leaves out blocks nobody sees.

    Args:
        mask: bool `[rows, 1, length, length]`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    rows, _, queries, keys = mask.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[row, 0, query, key]

    return create_block_mask(sees, rows, None, queries, keys, device=mask.device)
