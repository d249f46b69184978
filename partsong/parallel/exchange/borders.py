"""Exchanges border rows for convolutions and statistics for group norms when an image is cut into rows.

A convolution reads a few rows of the two neighbours, and a group norm needs the statistics of the whole image.
`SyncBorders` waits for the fresh values. `DisplacedBorders` reads those of the previous step while fresh ones are in
transit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.kernels import merge_group_norm_stats
from partsong.parallel.exchange.wires import as_bytes
from partsong.parallel.ranks.collectives import all_gather, exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.strategy import Borders, Ghosts, Statistics

__all__ = ["SyncBorders", "merged", "neighbours"]


class SyncBorders(Borders):
    """Waits for fresh values."""

    joins = True

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def ghosts(self, layer: int, first: Tensor | None, last: Tensor | None) -> Ghosts:
        """Returns the rows right above and below this rank's."""
        sends, recvs = neighbours(self.axis, first, last)
        incoming = {peer: torch.empty_like(like, memory_format=torch.contiguous_format) for peer, like in recvs.items()}
        outgoing = {peer: rows.contiguous() for peer, rows in sends.items()}
        exchange(self.axis, outgoing, incoming, name="border rows").wait()
        return incoming.get(self.axis.index - 1), incoming.get(self.axis.index + 1)

    def gathered(self, own: Statistics) -> Tensor:
        """Gathers the statistics of all ranks, `[ranks, 2, B, G]`."""
        table = own[0].new_empty((self.axis.size, 2, *own[0].shape))
        table[self.axis.index, 0], table[self.axis.index, 1] = own
        all_gather(self.axis, table, [1] * self.axis.size, name="group norm statistics").wait()
        return table

    def statistics(self, layer: int, own: Statistics, counts: Sequence[int]) -> Statistics:
        """Returns the mean and variance of the whole image."""
        return merged(counts, self.gathered(own))

    def joined(
        self, layer: int, own: Statistics, counts: Sequence[int], first: Tensor, last: Tensor
    ) -> tuple[Statistics, Ghosts]:
        """Returns the statistics of the whole image and the rows around this rank's, from one message of each peer."""
        mine, rows = torch.stack(own), neighbours(self.axis, first, last)[0]
        peers = [peer for peer in range(self.axis.size) if peer != self.axis.index]
        outgoing = {
            peer: torch.cat([as_bytes(part) for part in (mine, rows.get(peer)) if part is not None]) for peer in peers
        }
        incoming = {peer: torch.empty_like(packed) for peer, packed in outgoing.items()}
        exchange(self.axis, outgoing, incoming, name="border rows and norm statistics").wait()
        table, ghosts = [mine] * self.axis.size, dict[int, Tensor]()
        for peer, packed in incoming.items():
            table[peer] = packed[: mine.nbytes].view(mine.dtype).view_as(mine)
            if peer in rows:
                ghosts[peer] = packed[mine.nbytes :].view(first.dtype).view(first.shape)
        return merged(counts, torch.stack(table)), (ghosts.get(self.axis.index - 1), ghosts.get(self.axis.index + 1))

    def sends(self, step: int, is_last: bool) -> bool:
        """Says that every step sends border rows."""
        return True

    def sends_statistics(self, step: int, is_last: bool) -> bool:
        """Says that every step sends statistics."""
        return True

    def abandon(self) -> None:
        """Does nothing, since no message is pending."""


def neighbours(axis: Axis, first: Tensor | None, last: Tensor | None) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Returns the rows that go to each neighbour, and a tensor of the shape that comes from it."""
    before, after = axis.index - 1, axis.index + 1

    def existing(rows: dict[int, Tensor | None]) -> dict[int, Tensor]:
        return {peer: part for peer, part in rows.items() if part is not None and 0 <= peer < axis.size}

    return existing({before: first, after: last}), existing({before: last, after: first})


def merged(counts: Sequence[int], table: Tensor) -> Statistics:
    """Merges a table `[ranks, 2, B, G]` into the statistics of the whole image."""
    return merge_group_norm_stats(counts, list(table[:, 0]), list(table[:, 1]))
