"""Reports changes of texts while they are decoded, and which part of a text is final."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from partsong.samplers.text.canvas import Canvas
from partsong.samplers.text.rule import Choice, View

__all__ = ["Event", "Step", "TextStream", "events_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Describes one change of one text.

    Attributes:
        kind: "commit", an undecided position got its token; "revise", a decided one got another or none; "insert", a
            position was added; "delete", one was removed.
        row: which row of the batch that was asked for.
        position: within the whole text, from 0.
        token: the token there now, or None.
        old: the token there before, or None.
    """

    kind: Literal["commit", "revise", "insert", "delete"]
    row: int
    position: int
    token: int | None = None
    old: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Describes a step of a batch, between two forwards.

    Attributes:
        number: from 0.
        events: what changed, row by row from left to right; of several steps that one forward checked, one after
            the other.
        stable: by row of the batch, how many tokens after the prompt will not change any more.
        tokens: by row, all tokens after the prompt; None where nothing is decided.
        finished: rows that ended in this step.
    """

    number: int
    events: tuple[Event, ...]
    stable: dict[int, int]
    tokens: dict[int, list[int | None]]
    finished: tuple[int, ...]


def events_of(canvas: Canvas, view: View, choice: Choice, counts: Tensor | None = None) -> tuple[Event, ...]:
    """Lists the events of a choice, in all rows or in those that count, bool `[B]`."""
    events: list[Event] = []
    changed = choice.write | (choice.undecided & ~view.undecided & view.real)
    for moved in (choice.inserted, choice.deleted):
        changed = changed if moved is None else changed | moved
    changed = changed if counts is None else changed & counts[:, None]
    nothing = torch.zeros_like(changed)
    marks = (changed, view.undecided, choice.undecided, choice.inserted, choice.deleted)
    table = torch.stack(
        [
            *(nothing.long() if mark is None else mark.long() for mark in marks),
            view.current,
            choice.token,
            view.index,
            canvas.rows[:, None].expand_as(view.index),
        ],
        dim=2,
    ).tolist()  # one copy, however much has changed
    for is_changed, was_open, is_open, is_inserted, is_deleted, old, token, position, row in itertools.chain(*table):
        before, now = None if was_open else old, None if is_open else token
        kind = _kind(is_inserted, is_deleted, before)
        if is_changed and (kind != "revise" or now != before):
            events.append(Event(kind=kind, row=row, position=position, token=now, old=before))
    return tuple(events)


def _kind(is_inserted: int, is_deleted: int, old: int | None) -> Literal["commit", "revise", "insert", "delete"]:
    if is_inserted:
        return "insert"
    if is_deleted:
        return "delete"
    return "commit" if old is None else "revise"


def texts_of(canvas: Canvas, revises: bool) -> tuple[dict[int, int], dict[int, list[int | None]]]:
    """Returns by row of the batch how many tokens after the prompt are final, and all of them; see `Step`.

    A rule that revises may change active blocks.
    """
    open_ = (canvas.undecided | canvas.pending) & canvas.inside
    if revises:
        open_ = open_ | (canvas.work().places & canvas.free)
    first = open_.cumsum(1).eq(0).sum(1).minimum(canvas.length)
    numbers = torch.stack([canvas.rows, canvas.prompt, canvas.length, first - canvas.prompt], 1)
    stable: dict[int, int] = {}
    tokens: dict[int, list[int | None]] = {}
    # Undecided positions are negative, so that everything comes in one copy.
    shown = torch.where(canvas.undecided, -1, canvas.tokens)
    for name, begin, end, final, *text in torch.cat([numbers, shown], 1).tolist():
        tokens[name] = [None if token < 0 else token for token in text[begin:end]]
        stable[name] = final
    return stable, tokens


class TextStream:
    """Turns tokens that are decided in any order into text that only ever grows.

    Feed it every `Step` of a row; it returns the new text once all tokens before it are stable. A tokenizer may need
    several tokens for one character, so text is held back while it ends in an unfinished one.

    Args:
        decode: tokens to text, such as a tokenizer's ``decode``.
        row: which row of the batch.
        skip: token ids that are not shown, such as the end of text.

    >>> stream = TextStream(lambda ids: " ".join(map(str, ids)))
    >>> step = Step(number=0, events=(), stable={0: 2}, tokens={0: [7, 8, None]}, finished=())
    >>> stream.feed(step)
    '7 8'
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], row: int = 0, skip: Sequence[int] = ()) -> None:
        self.decode, self.row, self.skip = decode, row, frozenset(skip)
        self.shown = ""

    def feed(self, step: Step) -> str:
        """Returns the new text of this step, which is often empty."""
        if self.row not in step.stable:
            return ""
        tokens = step.tokens[self.row][: step.stable[self.row]]
        text = self.decode([token for token in tokens if token is not None and token not in self.skip])
        is_whole = self.row in step.finished or not text.endswith("\N{REPLACEMENT CHARACTER}")
        if not is_whole or not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new
