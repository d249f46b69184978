"""Writes trees of threads as texts, and threads as the text of a fork in a format."""

from __future__ import annotations

from collections.abc import Sequence

from partsong.errors import ArgumentError
from partsong.reasoning.calls.text_tree import Fork, Part
from partsong.reasoning.threads.formats import Format

__all__ = ["fork_text", "render"]


def render(parts: Sequence[Part], form: Format) -> str:
    """Writes a tree as the text that `parse` reads: its flat text, with separate threads after their message.

    Args:
        parts: the tree. A separate thread begins with its message, which the announcement contains already.
        form: a row of `FORMATS`.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> render((Fork((("<think1>", "a", "</think1>"),)), "<summary>"), FORMATS["parathinker"])
    '<think1>a</think1><summary>'
    """
    texts = []
    for part in parts:
        if isinstance(part, Fork):
            for number, thread in enumerate(part.threads, 1):
                texts.append(form.opener(number) + render(thread[1:], form) if part.apart else render(thread, form))
        else:
            texts.append(part if isinstance(part, str) else part.text)
    return "".join(texts)


def fork_text(
    form: Format, goals: Sequence[str], threads: Sequence[str], summary: str = "", returned: Sequence[str] = ()
) -> str:
    """Writes a whole fork in a format, from its announcement to the tag that closes it.

    Args:
        form: a row of `FORMATS`.
        goals: what each thread is for; formats without a plan leave it out.
        threads: the text of each thread. For separate threads it is the text before they return; an empty sequence
            leaves it out, as in the text their parent reads.
        summary: the text after the threads are joined.
        returned: what each thread returns, for separate threads.

    Returns:
        The text. The texts in `threads` and `summary` may hold forks.

    Raises:
        ArgumentError: there are no threads, or the numbers of goals, threads and returned texts differ.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> fork_text(FORMATS["parathinker"], [], ["add", "count"], "both")
    '<think1>add</think1><think2>count</think2><summary>both</summary>'
    """
    num = len(goals) if form.plan else len(threads)
    left_out = form.apart and not threads
    if not num or (len(threads) != num and not left_out) or len(returned) != (num if form.apart else 0):
        raise ArgumentError(
            f"{len(goals)} goals, {len(threads)} threads and {len(returned)} returned texts make no fork of format "
            f"{form.name}: give one of each to every thread"
        )
    ends = [f"{form.returned[0]}{text}" for text in returned] if form.returned else [""] * len(threads)
    texts = [
        f"{form.opener(number)}{text}{end}{form.closer(number)}"
        for number, (text, end) in enumerate(zip(threads, ends, strict=False), 1)
    ]
    joining = "".join(str(part) for part in form.joining(tuple(returned)))
    return "".join((_announcement(form, goals), *texts, joining, summary, form.end))


def _announcement(form: Format, goals: Sequence[str]) -> str:
    if form.plan is None:
        return form.announce
    opening, closing = form.item or ("", "")
    numbers = [f"{number}: " if form.numbered else "" for number in range(1, len(goals) + 1)]
    items = [f"{opening}{number}{goal}{closing}" for number, goal in zip(numbers, goals, strict=True)]
    return "\n".join((*filter(None, [form.begin]), form.plan[0], *items, form.announce))
