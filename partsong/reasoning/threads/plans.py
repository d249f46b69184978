"""Reads a text's announcement of threads: how many there are, and the task of each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from partsong.reasoning.threads.formats import Format

__all__ = ["ThreadPlan", "read_announcement", "read_plan", "stop_of"]

_NUMBER = re.compile(r"\s*(\d{1,4})\s*:")


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Holds the threads that were announced.

    Attributes:
        goals: what each thread is for, in the plan's words; empty where the format has no plan or it cannot be read.
        fault: what is wrong with the plan, in words; empty if it can be read.
    """

    goals: tuple[str, ...] = ()
    fault: str = ""


def read_plan(text: str, form: Format) -> ThreadPlan:
    """Reads the text between the tags of a plan.

    Items have only white space between them. Where threads are numbered, items begin with numbers that count from 1.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> read_plan("<plan>1: add</plan><plan>2: divide</plan>", FORMATS["npr"]).goals
    ('add', 'divide')
    """
    assert form.item is not None
    opening, closing = form.item
    goals: list[str] = []
    place = 0
    while place < len(text):
        begin = text.find(opening, place)
        between = text[place : begin if begin >= 0 else None]
        if between.strip():
            return ThreadPlan(fault=f"{_short(between)} stands in the plan outside of its items")
        if begin < 0:
            break
        end = text.find(closing, begin)
        if end < 0:
            return ThreadPlan(fault=f"item {len(goals) + 1} of the plan has no {closing}")
        item = text[begin + len(opening) : end]
        if form.numbered:
            number = _NUMBER.match(item)
            if number is None or int(number[1]) != len(goals) + 1:
                return ThreadPlan(fault=f"item {len(goals) + 1} of the plan is {_short(item)}, without that number")
            item = item[number.end() :]
        goals.append(item.strip() if form.numbered else item)
        place = end + len(closing)
    return ThreadPlan(tuple(goals)) if goals else ThreadPlan(fault="the plan has no items")


def read_announcement(text: str, form: Format) -> ThreadPlan | None:
    """Returns the threads that a text announced when a stop string ended it; None where the text simply ended.

    Engines leave out the stop string, and most do not report whether there was one. So the text itself has to show it:
    its plan is open, or it ends with what `stop_of` left of the tag. It begins where threads were last joined.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> read_announcement("So <guideline><plan>1: add</plan>", FORMATS["npr"])
    ThreadPlan(goals=('add',), fault='')
    """
    if form.plan is not None:
        opening, closing = form.plan
        begin = text.rfind(opening)
        is_open = begin >= 0 and text.rfind(closing) < begin
        return read_plan(text[begin + len(opening) :], form) if is_open else None
    if form.announce and text.endswith("</"):
        return ThreadPlan(fault=f"</{stop_of(form)} closes nothing")
    return ThreadPlan() if form.announce and text.endswith(form.announce[:1]) else None


def stop_of(form: Format) -> str:
    """Returns the stop string that ends a text when it announces threads; empty where texts do not announce them.

    In a format without a plan, the text keeps the first letter of the tag that announces threads. Without that letter
    nothing in the text would show whether the model wrote the tag or had no more to say.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> stop_of(FORMATS["npr"]), stop_of(FORMATS["parallel-r1"])
    ('</guideline>', 'Parallel>')
    """
    return form.announce if form.plan is not None else form.announce[1:]


def _short(text: str) -> str:
    quoted = repr(text.strip())
    return quoted if len(quoted) <= 40 else quoted[:37] + "..."
