"""Runs the decoding loop: reads the active positions, lets the rule choose, writes, until nothing is pending."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.kernels.no_token import NOT_A_NUMBER, why_no_token
from partsong.samplers.text.canvas import Canvas, RowNumbers, pick, read_rows
from partsong.samplers.text.events import Event, Step, events_of, texts_of
from partsong.samplers.text.reader import Aim, Reader
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
    """Says and returns why a row cannot go on, as `no_token` does, and takes back its certificates."""
    tally.certificate = tally.variation = None
    why = why_no_token(token, row, position)
    _LOG.warning(why)
    return why


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Holds the result of a forward for each row.

    Attributes:
        view: that of the active positions.
        hidden: `[B, K, C]`, the states it was computed from.
        kinds: int64 `[B]`, the number of each row's forward in `tally.KINDS`.
    """

    view: View
    hidden: Tensor
    kinds: Tensor


class Loop:
    """Decodes the texts of a canvas; iterate over it for the steps.

    Everything is computed where the model is. What the host has to know of a step, and how much the next one reads, it
    learns together at the end of the step, in one copy (`_plan`); another one follows where texts have ended.

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
        #: What the next forward reads; None where the rows have changed since it was decided.
        self.aim: Aim | None = None
        self.numbers: RowNumbers = {}

    def __iter__(self) -> Iterator[Step]:
        number = 0
        finished = self._leave(number)
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
        outcome = self._outcome(look.view, choice)
        self._write(look.view, choice)
        self._credit(waiting, look.kinds)
        self._plan(number + 1, outcome)
        self._note(self.numbers)
        self._give_up(look.view, self.numbers)
        return events

    @torch.no_grad()
    def _plan(self, number: int, outcome: Mapping[str, Tensor] | None = None) -> None:
        """Decides what a step reads, and brings the numbers of this to the host, with the outcome of the previous step.

        Args:
            number: of the step.
            outcome: more numbers of each row, `[B]`.
        """
        canvas = self.canvas
        work = canvas.work()
        canvas.begin(work.front)
        asked = work.places & canvas.free
        shadow = asked & ~canvas.undecided if self.rule.shadows else None
        if self.rule.reads == "undecided":
            asked = asked & canvas.undecided
        self.aim = self.reader.aim(number, work, asked, shadow)
        columns = self.views.columns(canvas, asked) | self.reader.columns(self.aim)
        self.numbers = read_rows({**(outcome or {}), "pending": canvas.pending.any(1), **columns})

    def _look(self, number: int) -> Look:
        """Reads the active positions with one forward."""
        if self.aim is None:
            self._plan(number)
        assert self.aim is not None
        canvas, aim, numbers = self.canvas, self.aim, self.numbers
        index, real = pick(aim.asked, max(numbers["asked"]))
        shadow = None if aim.shadow is None else real & aim.shadow.gather(1, index)
        hidden, twins, kinds = self.reader.read(aim, numbers, index, real, shadow)
        view = self.views.view(canvas, numbers, index, real, hidden, twins)
        self.reader.count_head(numbers["name"], numbers["asked"])
        if self.rule.heat(0) is not None:
            self.reader.set_temperatures(self.views.heats(numbers))
        self.aim = None
        return Look(view, hidden, kinds)

    def _choose(self, view: View) -> Choice:
        """Lets the rule choose; nothing changes in a row where some position has no token."""
        return self.rule.choose(view).except_in(view.lost.any(1), view)

    def _give_up(self, view: View, numbers: RowNumbers) -> None:
        """Ends the texts of rows where some position has no token, and says so for those that count."""
        if not any(numbers["lost"]):
            return
        lost = view.lost
        for row, name in enumerate(numbers["name"]):
            if numbers["lost"][row] and numbers["counts"][row]:
                place = int(lost[row].to(torch.uint8).argmax())
                token, where, tally = view.token[row, place], view.index[row, place], self.reader.tallies[name]
                # A shadow without a number leaves its position's own token as it is.
                self.faults[name] = report_no_token(min(int(token), NOT_A_NUMBER), name, int(where), tally)
        self.canvas.cut(lost.any(1))
        self.aim = None

    def _write(self, view: View, choice: Choice) -> None:
        """Writes the choice, and ends texts at a stop token; with rules that revise, once all before it is final."""
        self.reader.mark_stale(self.canvas.write(view, choice, self.filler))
        self.canvas.end(self.stops, self.rule.revises)

    def _outcome(self, view: View, choice: Choice, counts: Tensor | None = None) -> dict[str, Tensor]:
        """Computes what the tallies note of a choice, `[B]` each, in all rows or in those that count, bool `[B]`."""
        change = Change.of(view, choice)
        accepted = torch.where(change.new, view.entropy, 0.0)
        bound = {} if choice.variation is None else {"variation": choice.variation}
        return bound | {
            "lost": view.lost.any(1),
            "counts": torch.ones_like(self.canvas.rows) if counts is None else counts,
            "spent": (accepted.sum(1) - accepted.amax(1)).clamp(min=0.0),
            "edits": change.edits.sum(1),
        }

    def _note(self, numbers: RowNumbers) -> None:
        """Notes the outcome of a step in the tallies."""
        is_bound = self.rule.unbiased and not self.rule.revises
        for row, name in enumerate(numbers["name"]):
            if not numbers["counts"][row]:
                continue
            tally = self.reader.tallies[name]
            tally.edits += numbers["edits"][row]
            bound = tally.certificate
            tally.certificate = bound + numbers["spent"][row] if is_bound and bound is not None else None
            if "variation" in numbers:
                tally.variation = (tally.variation or 0.0) + numbers["variation"][row]

    def _credit(self, waiting: Tensor, kinds: Tensor) -> None:
        """Notes the kind of each row's forward, int64 `[B]`, for the waiting positions, bool `[B, L]`, it decided."""
        canvas = self.canvas
        canvas.decided_by = torch.where(waiting & ~canvas.undecided, kinds[:, None], canvas.decided_by)

    def _report(self, number: int, events: tuple[Event, ...], finished: tuple[int, ...]) -> Step:
        """Describes a step, and removes finished rows; `finished` were removed before it."""
        stable, tokens = texts_of(self.canvas, self.rule.revises) if self.watched else ({}, {})
        gone = self._leave(number + 1)
        return Step(number=number, events=events, stable=stable, tokens=tokens, finished=finished + gone)

    def _leave(self, number: int) -> tuple[int, ...]:
        """Removes rows in which nothing is pending, before step `number`."""
        if self.aim is None:
            self._plan(number)
        names, open_ = self.numbers["name"], self.numbers["pending"]
        if all(open_):
            return ()
        canvas, gone = self.canvas, list[int]()
        for row in (row for row, is_open in enumerate(open_) if not is_open):
            begin, end = int(canvas.prompt[row]), int(canvas.length[row])
            tokens = canvas.tokens[row, begin:end].tolist()
            stopped = "stop token" if tokens and tokens[-1] in self.stops.tolist() else "length"
            tally = self.reader.tallies[names[row]]
            # Tokens after the end of a text do not count.
            for kind in canvas.decided_by[row][canvas.free[row] & canvas.inside[row]].tolist():
                tally.tokens[KINDS[kind]] += 1
            self.ended[names[row]] = Ended(tokens, self.faults.get(names[row], stopped), tally)
            gone.append(names[row])
        self._keep(canvas.pending.any(1).nonzero().flatten())
        return tuple(gone)

    def _keep(self, rows: Tensor) -> None:
        """Forgets all rows but these, int64 `[n]`; a row named twice is held twice."""
        self.canvas.keep(rows)
        self.reader.keep(rows)
        self.views.keep(rows)
        self.aim = None
