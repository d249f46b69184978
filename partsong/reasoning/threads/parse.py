"""Reads texts of threads as trees, also where a model got the tags wrong.

It makes one pass over the tags of a format and never goes back, so it is linear in the text. A fork is accepted if
its plan and all its threads are complete. Otherwise its text is read as if it had never split, with a note. Other
mistakes get a note as well.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from partsong.reasoning.calls.text_tree import Fork, Part, Piece
from partsong.reasoning.threads.formats import Format
from partsong.reasoning.threads.plans import ThreadPlan, read_plan

__all__ = ["Parsed", "parse"]

#: How deep forks may be nested; deeper ones are read as text.
MAX_DEPTH = 16
#: Most notes that are kept.
MAX_NOTES = 16

_TAG = re.compile(r"</?\w+(?:\{number\})?>")
_NUMBER = re.compile(r"\s*(\d{1,4})\s*:")


@dataclass(frozen=True, slots=True)
class Parsed:
    """Holds a text as a tree.

    Attributes:
        parts: the tree. What a model writes is in pieces, and a tag that stopped it is a piece of its own. Text that
            the runtime inserts where threads begin and are joined is plain.
        notes: what is wrong with the text, in words; empty if it is well-formed.
    """

    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def parse(text: str, form: Format) -> Parsed:
    """Reads a finished text and never evaluates any of it.

    Args:
        text: the text, without the question. In APR it is the text of a parent, with all the texts of its children
            where they were spawned, or without them.
        form: a row of `FORMATS`.

    Returns:
        The tree, and what is wrong with the text. `flat_text` of the tree is the text again; with separate
        children, `render` gives it.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> parse("<think1>a</think1><think2>b</think2><summary>c", FORMATS["parathinker"]).parts[0].threads[1]
    ('<think2>', Piece(text='b', source='', tokens=None), Piece(text='</think2>', source='', tokens=None))
    >>> parse("<think1>a", FORMATS["parathinker"])
    Parsed(parts=(Piece(text='<think1>a', source='', tokens=None),), notes=('thread 1 has no end (character 0)',))
    """
    reader = _Reader(text, form)
    forks, _ = reader.body(0, None)
    more = (f"and {reader.omitted} more",) if reader.omitted else ()
    return Parsed(reader.assemble(0, len(text), forks), (*reader.notes, *more))


@dataclass(frozen=True, slots=True)
class _Tag:
    name: str
    begin: int
    end: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class _PlacedFork:
    """Holds a fork with the tags around it that the model did not write, and its place in the text."""

    begin: int
    end: int
    parts: tuple[Part, ...]


def _names(template: str) -> list[str]:
    return _TAG.findall(template)


@functools.cache
def _pattern(form: Format) -> re.Pattern[str]:
    """Returns a pattern that finds all tags of a format; the number in a tag is a group."""
    templates = [form.begin, *(form.plan or ()), *(form.item or ()), *(form.returned or ())]
    templates += [form.announce, form.thread_open, form.thread_close, form.join, form.end]
    names = dict.fromkeys(name for template in templates for name in _names(template))
    return re.compile("|".join(re.escape(name).replace(r"\{number\}", r"(\d{1,3})") for name in names))


class _Reader:
    """Makes one pass over a text.

    Attributes:
        notes: what is wrong so far.
        omitted: number of further notes that are not kept.
    """

    def __init__(self, text: str, form: Format) -> None:
        self.text, self.form, self.notes, self.omitted = text, form, list[str](), 0
        self._tags = [_tag(match) for match in _pattern(form).finditer(text)]
        self._place = 0
        (self._opens,), (self._closes,) = _names(form.thread_open), _names(form.thread_close)
        self._joins, self._ends = _names(form.join), _names(form.end)

    # --- tags ---------------------------------------------------------------------------------------------------------

    def _next(self) -> _Tag | None:
        return self._tags[self._place] if self._place < len(self._tags) else None

    def _take(self) -> _Tag:
        self._place += 1
        return self._tags[self._place - 1]

    def _follows(self, end: int, name: str) -> bool:
        """Returns whether the next tag has this name and only white space before it."""
        tag = self._next()
        return tag is not None and tag.name == name and not self.text[end : tag.begin].strip()

    def _note(self, words: str, place: int) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(f"{words} (character {place})")
        else:
            self.omitted += 1

    # --- texts --------------------------------------------------------------------------------------------------------

    def body(self, depth: int, opening: _Tag | None) -> tuple[list[_PlacedFork], bool]:
        """Reads a text up to its end, or the thread that a tag opens up to the tag that ends it.

        Returns the forks in it, and whether it has an end.
        """
        forks: list[_PlacedFork] = []
        due: list[str] = []
        while (tag := self._next()) is not None:
            if due and tag.name == due[0]:
                due.pop(0)
                self._take()
            elif opening is not None and tag.name in (self._closes, self._opens, *self._joins):
                self._missing(due, tag.begin)
                return forks, tag.name == self._closes and tag.number == opening.number
            elif opening is not None and self.form.returned and tag.name == self.form.returned[0]:
                self._take()
            elif self._announces(tag):
                self._missing(due, tag.begin)
                more, whole = self._fork(depth)
                forks += more
                due = list(self._ends) if whole else []
            else:
                self._stray(tag)
        self._missing(due, len(self.text))
        return forks, opening is None

    def _missing(self, due: list[str], place: int) -> None:
        if due:
            self._note(f"{due[0]} is missing", place)

    def _announces(self, tag: _Tag) -> bool:
        if self.form.plan is not None:
            return tag.name == self.form.plan[0]
        return tag.name == (self.form.announce or self._opens)

    def _stray(self, tag: _Tag) -> None:
        self._take()
        begins = self.form.plan is not None and tag.name == self.form.begin
        if not begins or not self._follows(tag.end, self.form.plan[0] if self.form.plan else ""):
            self._note(f"{self.text[tag.begin : tag.end]} belongs to no fork", tag.begin)

    def assemble(self, begin: int, end: int, forks: list[_PlacedFork]) -> tuple[Part, ...]:
        """Returns the parts of a text whose forks are known."""
        parts: list[Part] = []
        for fork in forks:
            parts += self._piece(begin, fork.begin)
            parts += fork.parts
            begin = fork.end
        return (*parts, *self._piece(begin, end))

    def _piece(self, begin: int, end: int) -> tuple[Piece, ...]:
        return (Piece(self.text[begin:end]),) if begin < end else ()

    # --- forks --------------------------------------------------------------------------------------------------------

    def _fork(self, depth: int) -> tuple[list[_PlacedFork], bool]:
        """Reads a fork from its announcement on, and returns whether it is whole.

        Also returns the fork or, if that is broken, the forks inside it that are whole.
        """
        tag = self._tags[self._place]
        if depth >= (MAX_DEPTH if self.form.nested else 1):
            self._take()
            self._note(f"a thread forks, deeper than {self.form.name} allows", tag.begin)
            return [], False
        begin, end, plan = self._announcement(tag)
        if plan.fault:
            self._note(plan.fault, tag.begin)
            return [], False
        threads, marks, inner, after = self._threads(depth, end, plan)
        if threads is None:
            return inner, False
        fork = [Fork(tuple(threads), marks if self.form.marks else (), apart=self.form.apart)] if threads else []
        if len(threads) < max(1, len(plan.goals)):
            self._note(f"{len(plan.goals) or 'some'} threads are announced, and {len(threads)} follow", begin)
        if not threads and not self.form.apart:
            return inner, False
        join = self._join(after)
        parts = (*self._piece(begin, end), *fork, *([join] if join else []))
        return [_PlacedFork(begin, after + len(join or ""), parts)], join is not None

    def _announcement(self, tag: _Tag) -> tuple[int, int, ThreadPlan]:
        """Reads the announcement: where the tag that stops the text begins and ends, and the plan."""
        if self.form.plan is None:
            if not self.form.announce:
                return tag.begin, tag.begin, ThreadPlan()
            self._take()
            return tag.begin, tag.end, ThreadPlan()
        if self.form.begin and not self._has_begun():
            self._note(f"no {self.form.begin} stands before the plan", tag.begin)
        self._take()
        while (inside := self._next()) is not None and inside.name in (self.form.item or ()):
            self._take()
        if inside is None or inside.name != self.form.plan[1]:
            return tag.begin, tag.end, ThreadPlan(fault=f"{tag.name} has no {self.form.plan[1]}")
        self._take()
        return inside.begin, inside.end, read_plan(self.text[tag.end : inside.begin], self.form)

    def _has_begun(self) -> bool:
        if not self._place:
            return False
        before, tag = self._tags[self._place - 1 : self._place + 1]
        return before.name == self.form.begin and not self.text[before.end : tag.begin].strip()

    def _threads(
        self, depth: int, end: int, plan: ThreadPlan
    ) -> tuple[list[tuple[Part, ...]] | None, tuple[int, ...], list[_PlacedFork], int]:
        """Reads threads that follow each other.

        Returns the parts of each, None where one is not whole; their marks; the forks inside them; where they end.
        """
        threads: list[tuple[Part, ...]] = []
        marks: list[int] = []
        inner: list[_PlacedFork] = []
        while self._follows(end, self._opens) and (not plan.goals or len(threads) < len(plan.goals)):
            tag, number = self._take(), len(threads) + 1
            head = self._head(end, tag, number, marks)
            if head is None:
                self._note(f"thread {number} has a wrong beginning", tag.begin)
                return None, (), inner, end
            forks, closed = self.body(depth + 1, tag)
            inner += forks
            if not closed:
                self._note(f"thread {number} has no end", tag.begin)
                return None, (), inner, end
            close = self._take()
            opener = plan.goals[number - 1] if self.form.apart else self.text[end:head]
            body = self.assemble(head, close.begin, forks)
            threads.append((opener, *body, Piece(self.text[close.begin : close.end])))
            marks.append(tag.number)
            end = close.end
        return threads, tuple(marks), inner, end

    def _head(self, end: int, tag: _Tag, number: int, marks: list[int]) -> int | None:
        """Returns where the text of a thread begins; None where its number or its tag is wrong."""
        if self.form.apart:
            return tag.end + 1 if self.text[end : tag.end + 1] == self.form.opener(number) else None
        if self.form.marks:
            return tag.end if tag.number and tag.number not in marks else None
        if not self.form.numbered:
            return tag.end
        match = _NUMBER.match(self.text, tag.end)
        return match.end() if match is not None and int(match[1]) == number else None

    def _join(self, end: int) -> str | None:
        """Reads the text where threads are joined; returns None where it is missing."""
        begin = end
        for number, name in enumerate(self._joins):
            if self.form.returned is not None and number:
                end = self._returns(end)
            if not self._follows(end, name):
                if self._place < len(self._tags) or self.text[end:].strip():
                    self._note(f"{name} is missing", end)
                else:
                    self._note("the text ends before threads come together", end)
                return None
            end = self._take().end
        return self.text[begin:end]

    def _returns(self, end: int) -> int:
        """Skips what threads returned; returns where it ends."""
        opening, closing = self.form.returned or ("", "")
        while self._follows(end, opening):
            self._take()
            tag = self._next()
            if tag is None or tag.name != closing:
                break
            end = self._take().end
        return end


def _tag(match: re.Match[str]) -> _Tag:
    number = next(filter(None, match.groups()), None)
    name = match[0] if number is None else match[0].replace(number, "{number}")
    return _Tag(name, match.start(), match.end(), int(number or 0))
