"""Runs the decoding loop: reads the active positions, lets the rule choose, writes, until nothing is pending."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.kernels.no_token import NOT_A_NUMBER, why_no_token
from partsong.samplers.text.canvas import Canvas
from partsong.samplers.text.events import Event, Step, events_of, stable_lengths
from partsong.samplers.text.reader import Reader, pick
from partsong.samplers.text.rule import Change, Choice, View
from partsong.samplers.text.tally import KINDS, Tally
from partsong.samplers.text.views import Views

__all__ = ["Ended", "Look", "Loop", "report_no_token"]

_LOG = logging.getLogger("partsong.samplers")


@dataclass(frozen=True, slots=True)
class Ended:
    """Holds a finished text: its tokens after the prompt, why it ended, and what it cost."""

    tokens: list[int]
    stopped: str
    tally: Tally


def report_no_token(token: int, row: int, position: int, tally: Tally) -> str:
    """Says and returns why a row cannot go on, as `no_token` does, and takes back its certificate."""
    tally.certificate, why = None, why_no_token(token, row, position)
    _LOG.warning(why)
    return why


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Holds the result of a forward for each row.

    Attributes:
        view: that of the active positions.
        hidden: `[B, K, C]`, the states it was computed from.
        kinds: kind of forward of each row.
    """

    view: View
    hidden: Tensor
    kinds: list[str]


class Loop:
    """Decodes the texts of a canvas; iterate over it for the steps.

    Args:
        canvas: the texts.
        views: shows positions to its rule.
        reader: runs the model on the canvas.
        stop_token_ids: tokens that end a text.
        watched: whether steps carry events and texts.
    """

    def __init__(
        self, canvas: Canvas, views: Views, reader: Reader, *, stop_token_ids: tuple[int, ...], watched: bool
    ) -> None:
        self.canvas, self.views, self.reader, self.watched = canvas, views, reader, watched
        self.model, self.rule = views.model, views.rule
        self.stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=canvas.tokens.device)
        mask = self.model.mask_token_id
        self.filler = None if self.model.adapter.noise == "uniform" else 0 if mask is None else mask
        self.ended: dict[int, Ended] = {}
        self.faults: dict[int, str] = {}

    def __iter__(self) -> Iterator[Step]:
        number = 0
        finished = self._leave()
        while len(self.canvas.rows):
            step = self._report(number, self._step(number), finished)
            yield step
            finished, number = (), number + 1
        assert not self.canvas.pending.any()

    @torch.no_grad()
    def _step(self, number: int) -> tuple[Event, ...]:
        """Makes one forward, and returns the changes."""
        waiting = self.canvas.undecided.clone()
        look = self._look(number)
        choice = self._choose(look.view)
        events = events_of(self.canvas, look.view, choice) if self.watched else ()
        self._note(look.view, choice)
        self._write(look.view, choice)
        self._credit(waiting, look.kinds)
        self._give_up(look.view)
        return events

    def _look(self, number: int) -> Look:
        """Reads the active positions with one forward."""
        canvas = self.canvas
        work = canvas.work()
        canvas.begin(work.front)
        mine = work.places & canvas.free
        index, real = pick(mine & canvas.undecided if self.rule.reads == "undecided" else mine)
        shadow = real & ~canvas.undecided.gather(1, index) if self.rule.shadows else None
        hidden, twins, kinds = self.reader.read(number, work, index, real, shadow)
        view = self.views.view(canvas, index, real, hidden, twins)
        self.reader.count_head(canvas.rows, real)
        if self.rule.heat(0) is not None:
            self.reader.set_temperatures(self.views.heats(canvas))
        return Look(view, hidden, kinds)

    def _choose(self, view: View) -> Choice:
        """Lets the rule choose; nothing changes in a row where some position has no token."""
        choice, lost = self.rule.choose(view), view.lost.any(1)
        return choice.except_in(lost, view) if lost.any() else choice

    def _give_up(self, view: View, counts: Tensor | None = None) -> None:
        """Ends the texts of rows where some position has no token, and says so for those that count, bool `[B]`."""
        lost = view.lost
        if not lost.any():
            return
        names = self.canvas.rows.tolist()
        for row in lost.any(1).nonzero().flatten().tolist():
            place = int(lost[row].to(torch.uint8).argmax())
            if counts is None or counts[row]:
                token, where, tally = view.token[row, place], view.index[row, place], self.reader.tallies[names[row]]
                # A shadow without a number leaves its position's own token as it is.
                self.faults[names[row]] = report_no_token(min(int(token), NOT_A_NUMBER), names[row], int(where), tally)
        self.canvas.cut(lost.any(1))

    def _write(self, view: View, choice: Choice) -> None:
        """Writes the choice, and ends texts at a stop token; with rules that revise, once all before it is final."""
        self.reader.mark_stale(self.canvas.write(view, choice, self.filler))
        self.canvas.end(self.stops, self.rule.revises)

    def _note(self, view: View, choice: Choice, counts: Tensor | None = None) -> None:
        """Notes the choice in the tallies, for all rows or those that count, bool `[B]`."""
        change = Change.of(view, choice)
        accepted = torch.where(change.new, view.entropy, 0.0)
        spent = (accepted.sum(1) - accepted.amax(1)).clamp(min=0.0).tolist()
        edits = change.edits.sum(1).tolist()
        is_bound = self.rule.unbiased and not self.rule.revises
        names = self.canvas.rows.tolist()
        for row in range(len(names)) if counts is None else counts.nonzero().flatten().tolist():
            tally = self.reader.tallies[names[row]]
            tally.edits += edits[row]
            tally.certificate = tally.certificate + spent[row] if is_bound and tally.certificate is not None else None

    def _credit(self, waiting: Tensor, kinds: list[str]) -> None:
        """Notes the kind of each row's forward for the waiting positions, bool `[B, L]`, that it decided."""
        canvas = self.canvas
        numbers = torch.tensor([KINDS.index(kind) for kind in kinds], device=waiting.device)
        canvas.decided_by = torch.where(waiting & ~canvas.undecided, numbers[:, None], canvas.decided_by)

    def _report(self, number: int, events: tuple[Event, ...], finished: tuple[int, ...]) -> Step:
        """Describes a step, and removes finished rows; `finished` were removed before it."""
        canvas, stable, tokens = self.canvas, {}, {}
        if self.watched:
            lengths = stable_lengths(canvas, self.rule.revises)
            for row, name in enumerate(canvas.rows.tolist()):
                begin, end = int(canvas.prompt[row]), int(canvas.length[row])
                open_ = canvas.undecided[row, begin:end].tolist()
                values = canvas.tokens[row, begin:end].tolist()
                tokens[name] = [None if waits else value for value, waits in zip(values, open_, strict=True)]
                stable[name] = lengths[row]
        return Step(number=number, events=events, stable=stable, tokens=tokens, finished=finished + self._leave())

    def _leave(self) -> tuple[int, ...]:
        """Removes rows in which nothing is pending."""
        canvas = self.canvas
        done = ~canvas.pending.any(1)
        if not done.any():
            return ()
        names = canvas.rows.tolist()
        gone = []
        for row in done.nonzero().flatten().tolist():
            begin, end = int(canvas.prompt[row]), int(canvas.length[row])
            tokens = canvas.tokens[row, begin:end].tolist()
            stopped = "stop token" if tokens and tokens[-1] in self.stops.tolist() else "length"
            tally = self.reader.tallies[names[row]]
            # Tokens after the end of a text do not count.
            for kind in canvas.decided_by[row][canvas.free[row] & canvas.inside[row]].tolist():
                tally.tokens[KINDS[kind]] += 1
            self.ended[names[row]] = Ended(tokens, self.faults.get(names[row], stopped), tally)
            gone.append(names[row])
        self._keep((~done).nonzero().flatten())
        return tuple(gone)

    def _keep(self, rows: Tensor) -> None:
        """Forgets all rows but these, int64 `[n]`; a row named twice is held twice."""
        self.canvas.keep(rows)
        self.reader.keep(rows)
        self.views.keep(rows)
