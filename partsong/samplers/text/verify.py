"""Decodes several steps with one forward; the text is the same as with one forward for each.

A forward shows what the rule chooses next, and what it would choose after that if nothing else changed. So the rule
continues for some steps on the same forward, and these steps are drafts. The text after each of them becomes a row of
the next forward, where the rule chooses again, in every row by what that row shows. If its choice in one row leads to
the next row, then that was the text's own next state, and the choice in it counts as well; from the first row that
differs on nothing counts. Whatever counts is what decoding without drafts chooses, because noise is a function of
(seed, step, position) and each row draws with that of its own step.

Drafts cost no forward, and the first row of a forward is always the text itself. So there are never more forwards than
steps, and as many rows more as there are drafts. Drafts share their noise with the choices they foresee: a draft fails
only where the model's prediction changes, not because of different random numbers.

Source: states of several steps in one batch, FreeDave, arXiv 2510.00294, and Spiffy, arXiv 2509.18085; here for all
rules that only decide, however many tokens a step takes, and at any temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.samplers.text.canvas import Canvas, read_rows
from partsong.samplers.text.events import Event, events_of
from partsong.samplers.text.loop import Loop
from partsong.samplers.text.reader import Reader
from partsong.samplers.text.views import Views

__all__ = ["VerifiedLoop"]


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Holds the result of a forward for each text, for drafts.

    Attributes:
        index: int64 `[B, K]`, positions.
        real: bool `[B, K]`, which of them exist.
        hidden: `[B, K, C]`.
    """

    index: Tensor
    real: Tensor
    hidden: Tensor

    def of(self, rows: Tensor) -> _Seen:
        """Returns the same of some rows."""
        return _Seen(self.index[rows], self.real[rows], self.hidden[rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """Holds texts after one more drafted step.

    Attributes:
        texts: int64 `[n]`, which rows of the loop they are drafts of.
        canvas: with n rows.
        tokens: int64 `[n]`, how many tokens the step wrote.
    """

    texts: Tensor
    canvas: Canvas
    tokens: Tensor


class VerifiedLoop(Loop):
    """Decodes as `Loop` does, token for token, and checks several steps with each forward.

    Args:
        canvas: as for `Loop`, and so are the others.
        views: of a rule that only decides, by what it sees in a step.
        reader: of a cache that is exact.
        stop_token_ids: tokens that end a text.
        watched: whether steps carry events and texts.
        drafts: steps of a text that are drafted at most, beyond the next one.
    """

    def __init__(
        self,
        canvas: Canvas,
        views: Views,
        reader: Reader,
        *,
        stop_token_ids: tuple[int, ...],
        watched: bool,
        drafts: int,
    ) -> None:
        super().__init__(canvas, views, reader, stop_token_ids=stop_token_ids, watched=watched)
        self.drafts = drafts
        self.seen: _Seen | None = None

    @torch.no_grad()
    def _step(self, number: int) -> tuple[Event, ...]:
        """Goes on by one forward, and returns what changed."""
        waiting = self.canvas.undecided.clone()
        drafts = [] if self.seen is None else self._draft(self.seen)
        self._spread(drafts)
        before = self.canvas.copy()
        look = self._look(number)
        choice = self._choose(look.view)
        if self.views.memory or self.views.last is not None:
            raise UnsupportedError(f"{type(self.rule).__name__} remembers earlier steps, so verify cannot be used")
        self._write(look.view, choice)
        counts, last = self._follow(before, drafts, len(waiting))
        numbers = read_rows({"name": self.canvas.rows, **self._outcome(look.view, choice, counts)})
        self._note(numbers)
        events = events_of(self.canvas, look.view, choice, counts) if self.watched else ()
        self.seen = _Seen(look.view.index, look.view.real, look.hidden)
        self._give_up(look.view, numbers)
        self._keep(last)
        self._credit(waiting, look.kinds[: len(waiting)])
        return events

    def _draft(self, seen: _Seen) -> list[_Draft]:
        """Continues the rule on the last forward, as far as it covers the active positions."""
        canvas, drafts = self.canvas.copy(), []
        texts = torch.arange(len(canvas.rows), device=canvas.rows.device)
        for _ in range(self.drafts):
            work = canvas.work()
            canvas.begin(work.front)
            wanted = work.places & canvas.free & canvas.undecided
            shown = torch.zeros_like(wanted).scatter_(1, seen.index, seen.real)
            rows = (wanted.any(1) & ~(wanted & ~shown).any(1)).nonzero().flatten()
            canvas.keep(rows)
            texts, seen, wanted = texts[rows], seen.of(rows), wanted[rows]
            if not len(rows):
                break
            real = seen.real & wanted.gather(1, seen.index)
            numbers = read_rows(self.views.columns(canvas, wanted))
            view = self.views.view(canvas, numbers, seen.index, real, seen.hidden)
            self.reader.count_head(numbers["name"], numbers["asked"])
            choice = self._choose(view)
            canvas.write(view, choice, self.filler)
            canvas.end(self.stops, self.rule.revises)
            drafts.append(_Draft(texts, canvas.copy(), choice.write.sum(1)))
        return [draft for draft in map(_unfinished, drafts) if len(draft.texts)]

    def _spread(self, drafts: list[_Draft]) -> None:
        """Gives every drafted state a row of its own, after those of the texts."""
        if not drafts:
            return
        own = torch.arange(len(self.canvas.rows), device=self.canvas.rows.device)
        texts = torch.cat([own, *(draft.texts for draft in drafts)])
        tokens = self.canvas.tokens[texts]
        self.canvas = self.reader.canvas = Canvas.join([self.canvas, *(draft.canvas for draft in drafts)])
        self.reader.keep(texts)
        self.aim = None
        self.reader.mark_stale(self.canvas.tokens != tokens)

    def _follow(self, before: Canvas, drafts: list[_Draft], num: int) -> tuple[Tensor, Tensor]:
        """Goes from row to row as long as the choice in one leads to the next.

        Args:
            before: the rows as they were read; the canvas holds them after their choices.
            drafts: of the rows behind the first ones.
            num: how many rows are the texts themselves.

        Returns:
            Which rows count, bool `[R]`, and the last of them for each text, int64 `[num]`.
        """
        numbers = torch.arange(len(before.rows), device=before.rows.device)
        last, counts = numbers[:num], numbers < num
        for draft, rows in zip(drafts, numbers[num:].split([len(draft.texts) for draft in drafts]), strict=True):
            came = last[draft.texts]
            # A draft of a later step than the text reached has made more steps.
            follows = (before.step[came] + 1 == before.step[rows]) & self.canvas.equals(came, before, rows)
            counts[rows] = follows
            last = last.index_copy(0, draft.texts[follows], rows[follows])
            self._count(draft, follows)
        return counts, last

    def _count(self, draft: _Draft, follows: Tensor) -> None:
        """Notes the tokens that were drafted for some texts in the tallies, and those that were not chosen."""
        for name, tokens, chosen in zip(
            draft.canvas.rows.tolist(), draft.tokens.tolist(), follows.tolist(), strict=True
        ):
            tally = self.reader.tallies[name]
            tally.drafted += tokens
            tally.rejected += 0 if chosen else tokens

    def _keep(self, rows: Tensor) -> None:
        """Forgets all rows but these."""
        super()._keep(rows)
        self.seen = None if self.seen is None else self.seen.of(rows)


def _unfinished(draft: _Draft) -> _Draft:
    """Leaves out texts that are done: there is nothing to choose in them."""
    rows = draft.canvas.pending.any(1).nonzero().flatten()
    canvas = replace(draft.canvas)
    canvas.keep(rows)
    return _Draft(draft.texts[rows], canvas, draft.tokens[rows])
