"""Exchanges border rows and statistics that are read a step later, while the fresh ones travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partsong.kernels import corrected_group_norm_stats
from partsong.parallel.exchange.borders import SyncBorders, merged, neighbours
from partsong.parallel.exchange.mailbox import CHUNK, Letter, Mailbox
from partsong.parallel.exchange.wires import Wire, bytes_sent
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.strategy import Borders, Ghosts, Statistics

__all__ = ["DisplacedBorders"]

#: Layers whose border rows or statistics travel in one message.
LAYERS_PER_MESSAGE = 16


def _letter(sends: dict[int, Tensor], recvs: dict[int, Tensor]) -> Letter:
    shapes = ({peer: tensor.shape for peer, tensor in tensors.items()} for tensors in (sends, recvs))
    return Letter(*shapes)


@dataclass(slots=True)
class _Branch:
    """Keeps what one guidance branch saw in its synchronous steps, and then its mailboxes.

    Attributes:
        letters: the shapes that each layer sends and receives, in order of execution, for rows and for statistics.
        history: what each layer of the last synchronous steps received, newest last.
        sent: what each layer of the last synchronous step sent, where a wire needs it.
        boxes: the mailbox of each layer, once the first displaced step has begun.
        own: this rank's statistics of the last step.
    """

    letters: dict[str, dict[int, Letter]] = field(default_factory=dict)
    history: dict[int, list[dict[int, Tensor]]] = field(default_factory=dict)
    sent: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    boxes: dict[int, Mailbox] = field(default_factory=dict)
    own: dict[int, Tensor] = field(default_factory=dict)


class DisplacedBorders(Borders):
    """Reads values of the previous step, or forecasts from the last two, while fresh ones are in transit.

    With ``order=0`` a group norm's statistics are corrected by how much the rank's own have changed, as in DistriFusion
    (arXiv 2402.19481) but with torch's biased variance. With ``order=1`` the rank's own are fresh. Those of one other
    rank are extrapolated in time, those of several are the previous step's: what a step gets wrong is then most of what
    the next one reads, and a line through it grows.

    Args:
        axis: the ranks, from the image's top to its bottom.
        clock: where the generation stands.
        warmup_steps: first steps that wait for fresh values.
        order: 0 or 1, as in `DisplacedPatch`.
        fresh_norms: whether every step waits for fresh statistics.
        wire: how displaced rows are written into messages; None sends them as they are, as statistics always are.
    """

    def __init__(
        self,
        axis: Axis,
        clock: StepClock,
        warmup_steps: int,
        order: int,
        *,
        fresh_norms: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.axis, self.clock, self.warmup_steps, self.order = axis, clock, warmup_steps, order
        self.fresh_norms, self.wire = fresh_norms, wire
        self._sync = SyncBorders(axis)
        self._branches: dict[int, _Branch] = {}
        clock.on_begin(self.reset)
        clock.on_end(self.reset)
        clock.on_change(self.forget)

    def reset(self) -> None:
        """Waits for pending messages and forgets them."""
        for branch in list(self._branches):
            self.forget(branch)

    def forget(self, branch: int) -> None:
        """Waits for pending messages of one branch, and forgets them."""
        for box in set(self._branches.pop(branch, _Branch()).boxes.values()):
            box.settle()

    def abandon(self) -> None:
        """Forgets pending messages without waiting, after an error."""
        self._branches.clear()

    def sends(self, step: int, is_last: bool) -> bool:
        """Says whether a step sends rows: the last one only if it is synchronous, since no later step reads them."""
        return not is_last or step < self.warmup_steps

    def sends_statistics(self, step: int, is_last: bool) -> bool:
        """Says whether a step sends statistics; the last step also sends fresh ones."""
        return self.fresh_norms or self.sends(step, is_last)

    def row_bytes(self, numbers: int, itemsize: int, step: int) -> int:
        """Returns the bytes of one layer's rows in a message, in chunks where there is a wire."""
        if self.wire is None or step < self.warmup_steps:
            return numbers * itemsize
        return bytes_sent(self.wire, (-(-numbers // CHUNK), 1, CHUNK), itemsize)

    def ghosts(self, layer: int, first: Tensor | None, last: Tensor | None) -> Ghosts:
        """Returns the rows right above and below this rank's, as far as they are known."""
        branch = self._branch()
        sends, recvs = neighbours(self.axis, first, last)
        before, after = self.axis.index - 1, self.axis.index + 1
        if not self._displaced(branch, layer):
            above, below = self._sync.ghosts(layer, first, last)
            known = {peer: rows for peer, rows in ((before, above), (after, below)) if rows is not None}
            self._remember(branch, "rows", layer, _letter(sends, recvs), known)
            if self.wire is not None:
                branch.sent[layer] = {peer: rows.clone() for peer, rows in sends.items()}
            return above, below
        like = next(iter((*sends.values(), *recvs.values())))
        box = self._box(branch, "rows", layer, like)
        old = box.read(layer)
        box.write(layer, sends, post=not self.clock.is_last_step)
        return old.get(before), old.get(after)

    def statistics(self, layer: int, own: Statistics, counts: Sequence[int]) -> Statistics:
        """Returns the mean and variance of the whole image, as far as they are known."""
        if self.fresh_norms:
            return merged(counts, self._sync.gathered(own))
        branch, mine = self._branch(), torch.stack(own)
        peers = [peer for peer in range(self.axis.size) if peer != self.axis.index]
        sends = dict.fromkeys(peers, mine)
        stale, branch.own[layer] = branch.own.get(layer), mine
        if not self._displaced(branch, layer):
            table = self._sync.gathered(own)
            self._remember(branch, "statistics", layer, _letter(sends, sends), {peer: table[peer] for peer in peers})
            return merged(counts, table)
        assert stale is not None
        box = self._box(branch, "statistics", layer, mine)
        old = box.read(layer)
        table = torch.stack([old.get(peer, mine if self.order else stale) for peer in range(self.axis.size)])
        box.write(layer, sends, post=not self.clock.is_last_step)
        if self.order == 0:
            whole = merged(counts, table)
            return corrected_group_norm_stats(whole, (stale[0], stale[1]), own)
        # A variance that falls fast may be extrapolated below zero; then the rank's own is the better guess.
        table[:, 1] = torch.where(table[:, 1] > 0, table[:, 1], own[1])
        return merged(counts, table)

    def _branch(self) -> _Branch:
        return self._branches.setdefault(self.clock.branch, _Branch())

    def _displaced(self, branch: _Branch, layer: int) -> bool:
        return self.clock.step >= self.warmup_steps and (layer in branch.boxes or layer in branch.history)

    def _remember(self, branch: _Branch, kind: str, layer: int, letter: Letter, known: dict[int, Tensor]) -> None:
        branch.letters.setdefault(kind, {})[layer] = letter
        # A forecast reads the last two steps only.
        branch.history[layer] = [*branch.history.get(layer, [])[-1:], known]

    def _box(self, branch: _Branch, kind: str, layer: int, like: Tensor) -> Mailbox:
        if layer not in branch.boxes:
            letters = branch.letters.pop(kind)
            layers = list(letters)
            for start in range(0, len(layers), LAYERS_PER_MESSAGE):
                run = {index: letters[index] for index in layers[start : start + LAYERS_PER_MESSAGE]}
                past = {index: branch.history.pop(index) for index in run}
                keep = 1 + self._order_of(kind)
                named: dict[str, Any] = {"like": like, "name": f"displaced {kind}", "keep": keep}
                if kind == "rows" and self.wire is not None:
                    named |= {"wire": self.wire, "sent": {index: branch.sent.pop(index) for index in run}}
                box = Mailbox(self.axis, run, past, **named)
                branch.boxes |= dict.fromkeys(run, box)
        box = branch.boxes[layer]
        box.open(self.clock.step_ratio if self._order_of(kind) else None, self.clock.step)
        return box

    def _order_of(self, kind: str) -> int:
        """Returns 1 for what is extrapolated: rows, and the statistics of a single other rank."""
        return self.order if kind == "rows" or self.axis.size == 2 else 0
