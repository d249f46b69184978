"""Trees of threads become texts, and threads become the text of a fork in a format."""

from __future__ import annotations

from collections.abc import Sequence

from partsong.errors import ArgumentError
from partsong.reasoning.calls.text_tree import Fork, Part
from partsong.reasoning.threads.formats import Format

__all__ = ["fork_text", "render"]


def render(parts: Sequence[Part], form: Format) -> str:
    """A tree as the text that `parse` reads: its flat text, and threads that stand apart behind what announced them.

    Args:
        parts: the tree. A thread that stands apart begins with its message, which the announcement holds already.
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
    """A whole fork in a format, from its announcement to the tag that closes it.

    Args:
        form: a row of `FORMATS`.
        goals: what each thread is for; formats without a plan do not say it.
        threads: what each thread says. Of threads that stand apart, before it returns; none leaves them out, as their
            parent reads the text.
        summary: what follows where the threads have come together.
        returned: what each returns, where they stand apart.

    Returns:
        The text; what stands in `threads` and `summary` may hold forks itself.

    Raises:
        ArgumentError: no threads, or other numbers of goals or returned texts than threads.

    >>> from partsong.reasoning.threads.formats import FORMATS
    >>> fork_text(FORMATS["parathinker"], [], ["add", "count"], "both")
    '<think1>add</think1><think2>count</think2><summary>both</summary>'
    """
    wanted = len(goals) if form.plan else len(threads)
    spoken = form.apart and not threads
    if not wanted or (len(threads) != wanted and not spoken) or len(returned) != (wanted if form.apart else 0):
        raise ArgumentError(
            f"{len(goals)} goals, {len(threads)} threads and {len(returned)} returned texts make no fork of format "
            f"{form.name}: give one of each to every thread"
        )
    ends = [f"{form.returned[0]}{text}" for text in returned] if form.returned else [""] * len(threads)
    written = [
        f"{form.opener(number)}{text}{end}{form.closer(number)}"
        for number, (text, end) in enumerate(zip(threads, ends, strict=False), 1)
    ]
    joining = "".join(str(part) for part in form.joining(tuple(returned)))
    return "".join((_announcement(form, goals), *written, joining, summary, form.end))


def _announcement(form: Format, goals: Sequence[str]) -> str:
    if form.plan is None:
        return form.announce
    before, behind = form.item or ("", "")
    numbers = [f"{number}: " if form.numbered else "" for number in range(1, len(goals) + 1)]
    items = [f"{before}{number}{goal}{behind}" for number, goal in zip(numbers, goals, strict=True)]
    return "\n".join((*filter(None, [form.begin]), form.plan[0], *items, form.announce))
