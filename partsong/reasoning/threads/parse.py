"""Texts of threads become trees, whatever a model made of the tags.

One pass over the tags of a format, which never goes back: linear in the text. A fork stands if its plan and all its
threads are whole; else its text is read as one that never parted, with a note. What is wrong elsewhere is noted.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from partsong.reasoning.calls.text_tree import Fork, Part, Piece
from partsong.reasoning.threads.formats import Format
from partsong.reasoning.threads.plans import ThreadPlan, read_plan

__all__ = ["Parsed", "parse"]

#: Forks within forks within forks; deeper ones are read as text.
MAX_DEPTH = 16
#: Notes that are kept.
MAX_NOTES = 16

_TAG = re.compile(r"</?\w+(?:\{number\})?>")
_NUMBER = re.compile(r"\s*(\d{1,4})\s*:")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A text as a tree.

    Attributes:
        parts: the tree. What a model writes is in pieces, a tag that stopped it in one of its own; what the runtime
            puts there, where threads begin and where they come together, is plain text.
        notes: what is wrong with the text, in words; empty where nothing is.
    """

    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def parse(text: str, form: Format) -> Parsed:
    """Reads a finished text, never evaluating any of it.

    Args:
        text: without the question.
        form: a row of `FORMATS`. Of APR, a parent's text in which each child's stands where it was spawned, or none.

    Returns:
        The tree and what is wrong. `flat_text` of it is the text again; with children that stand apart, `render` is.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> parse("<think1>a</think1><think2>b</think2><summary>c", FORMATS["parathinker"]).parts[0].threads[1]
    ('<think2>', Piece(text='b', source='', tokens=None), Piece(text='</think2>', source='', tokens=None))
    >>> parse("<think1>a", FORMATS["parathinker"])
    Parsed(parts=(Piece(text='<think1>a', source='', tokens=None),), notes=('thread 1 has no end (character 0)',))
    """
    reader = _Reader(text, form)
    forks, _ = reader.body(0, None)
    more = (f"and {reader.unsaid} more",) if reader.unsaid else ()
    return Parsed(reader.assembled(0, len(text), forks), (*reader.notes, *more))


@dataclass(frozen=True, slots=True)
class _Tag:
    name: str
    begin: int
    end: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class _Forked:
    """A fork, with the tags around it that are no text of the model's, and its place."""

    begin: int
    end: int
    parts: tuple[Part, ...]


def _names(template: str) -> list[str]:
    return _TAG.findall(template)


@functools.cache
def _pattern(form: Format) -> re.Pattern[str]:
    """Finds all tags of a format; the number of one that has any is a group."""
    templates = [form.begin, *(form.plan or ()), *(form.item or ()), *(form.returned or ())]
    templates += [form.announce, form.thread_open, form.thread_close, form.join, form.end]
    names = dict.fromkeys(name for template in templates for name in _names(template))
    return re.compile("|".join(re.escape(name).replace(r"\{number\}", r"(\d{1,3})") for name in names))


class _Reader:
    """One pass over a text.

    Attributes:
        notes: what is wrong so far.
        unsaid: what is wrong beyond that.
    """

    def __init__(self, text: str, form: Format) -> None:
        self.text, self.form, self.notes, self.unsaid = text, form, list[str](), 0
        self._tags = [_tag(found) for found in _pattern(form).finditer(text)]
        self._place = 0
        (self._opens,), (self._closes,) = _names(form.thread_open), _names(form.thread_close)
        self._joins, self._ends = _names(form.join), _names(form.end)

    # --- tags ---------------------------------------------------------------------------------------------------------

    def _next(self) -> _Tag | None:
        return self._tags[self._place] if self._place < len(self._tags) else None

    def _take(self) -> _Tag:
        self._place += 1
        return self._tags[self._place - 1]

    def _follows(self, end: int, name: str, ahead: int = 0) -> bool:
        """Whether a tag of some name is the next, with nothing but white space before it."""
        place = self._place + ahead
        tag = self._tags[place] if place < len(self._tags) else None
        return tag is not None and tag.name == name and not self.text[end : tag.begin].strip()

    def _note(self, words: str, place: int) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(f"{words} (character {place})")
        else:
            self.unsaid += 1

    # --- texts --------------------------------------------------------------------------------------------------------

    def body(self, depth: int, opening: _Tag | None) -> tuple[list[_Forked], bool]:
        """Reads a text up to its end, or a thread up to the tag that ends it.

        Args:
            depth: forks around it.
            opening: the thread's first tag; None where it is none.

        Returns:
            The forks in it, and whether it has an end.
        """
        forks: list[_Forked] = []
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

    def assembled(self, begin: int, end: int, forks: list[_Forked]) -> tuple[Part, ...]:
        """The parts of a text, of which forks are known."""
        parts: list[Part] = []
        for fork in forks:
            parts += self._piece(begin, fork.begin)
            parts += fork.parts
            begin = fork.end
        return (*parts, *self._piece(begin, end))

    def _piece(self, begin: int, end: int) -> tuple[Piece, ...]:
        return (Piece(self.text[begin:end]),) if begin < end else ()

    # --- forks --------------------------------------------------------------------------------------------------------

    def _fork(self, depth: int) -> tuple[list[_Forked], bool]:
        """Reads a fork from its announcement on: it, or those that are left within it, and whether it is whole."""
        tag = self._tags[self._place]
        if depth >= (MAX_DEPTH if self.form.nested else 1):
            self._take()
            self._note(f"a thread forks, deeper than {self.form.name} allows", tag.begin)
            return [], False
        begin, end, plan = self._announcement(tag)
        if plan.fault:
            self._note(plan.fault, tag.begin)
            return [], False
        threads, marks, inner, behind = self._threads(depth, end, plan)
        if threads is None:
            return inner, False
        fork = [Fork(tuple(threads), marks if self.form.marks else (), apart=self.form.apart)] if threads else []
        if len(threads) < max(1, len(plan.goals)):
            self._note(f"{len(plan.goals) or 'some'} threads are announced, and {len(threads)} follow", begin)
        if not threads and not self.form.apart:
            return inner, False
        join = self._join(behind)
        parts = (*self._piece(begin, end), *fork, *(join or ()))
        last = behind + len(join[0]) if join else behind
        return [_Forked(begin, last, parts)], join is not None

    def _announcement(self, tag: _Tag) -> tuple[int, int, ThreadPlan]:
        """Reads what comes before the threads: where the tag that stops the text begins and ends, and the plan."""
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
    ) -> tuple[list[tuple[Part, ...]] | None, tuple[int, ...], list[_Forked], int]:
        """Reads threads that follow each other: their parts, None where one is not whole; marks; forks; their end."""
        threads: list[tuple[Part, ...]] = []
        marks: list[int] = []
        inner: list[_Forked] = []
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
            body = self.assembled(head, close.begin, forks)
            threads.append((opener, *body, Piece(self.text[close.begin : close.end])))
            marks.append(tag.number)
            end = close.end
        return threads, tuple(marks), inner, end

    def _head(self, end: int, tag: _Tag, number: int, marks: list[int]) -> int | None:
        """Where a thread's own text begins; None where its number or its tag is not what it has to be."""
        if self.form.apart:
            return tag.end + 1 if self.text[end : tag.end + 1] == self.form.opener(number) else None
        if self.form.marks:
            return tag.end if tag.number and tag.number not in marks else None
        if not self.form.numbered:
            return tag.end
        found = _NUMBER.match(self.text, tag.end)
        return found.end() if found is not None and int(found[1]) == number else None

    def _join(self, end: int) -> tuple[str] | None:
        """Reads what stands where threads come together."""
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
        return (self.text[begin:end],)

    def _returns(self, end: int) -> int:
        """Passes over what threads returned."""
        opening, closing = self.form.returned or ("", "")
        while self._follows(end, opening):
            self._take()
            tag = self._next()
            if tag is None or tag.name != closing:
                break
            end = self._take().end
        return end


def _tag(found: re.Match[str]) -> _Tag:
    number = next(filter(None, found.groups()), None)
    name = found[0] if number is None else found[0].replace(number, "{number}")
    return _Tag(name, found.start(), found.end(), int(number or 0))
