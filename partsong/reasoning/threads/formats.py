"""Says how texts of threads are written: one row of data per format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from partsong.reasoning.calls.text_tree import Part, Piece

__all__ = ["FORMATS", "Format", "FormatName"]

#: Names of the formats.
FormatName = Literal["threadweaver", "multiverse", "npr", "parallel-r1", "parathinker", "apr"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    r"""Holds the tags of a format.

    A model announces threads by writing a plan, one item per thread, between the tags of `plan`. Where `plan` is None
    it writes `announce` alone, or nothing where that is empty too, and the caller sets the number of threads. Each
    thread begins with `thread_open` and ends with `thread_close`. After the last one the text continues with `join`.

    Attributes:
        name: name of the format.
        source: paper it comes from.
        begin: tag before the plan.
        plan: tags around the items.
        item: tags around an item. Where threads are numbered it begins with its number and a colon.
        announce: tag at which the main text stops and threads begin.
        thread_open: beginning of a thread; ``{number}`` counts from 1.
        thread_close: what ends a thread; ``{number}`` counts from 1.
        join: how the text continues; ``{returned}`` is what the threads return.
        end: tags that close the whole fork, in order; the model writes them.
        marks: whether threads have thought embeddings.
        nested: whether threads may fork.
        returned: tags around what a thread returns, in formats with separate threads. Such a thread reads only its
            item, and only its return value is read.

    >>> FORMATS["threadweaver"].opener(2), FORMATS["parathinker"].closer(2)
    ('\n<Thread>\n2:', '</think2>')
    """

    name: FormatName
    source: str
    begin: str = ""
    plan: tuple[str, str] | None = None
    item: tuple[str, str] | None = None
    announce: str = ""
    thread_open: str
    thread_close: str
    join: str
    end: str = ""
    marks: bool = False
    nested: bool = False
    returned: tuple[str, str] | None = None

    @property
    def apart(self) -> bool:
        """Returns whether threads read nothing of the text they were announced in."""
        return self.returned is not None

    @property
    def numbered(self) -> bool:
        """Returns whether the items of a plan have numbers."""
        return self.plan is not None and "{number}" in self.thread_open

    def opener(self, number: int) -> str:
        """Returns what thread `number`, counted from 1, begins with."""
        return self.thread_open.replace("{number}", str(number))

    def closer(self, number: int) -> str:
        """Returns what thread `number`, counted from 1, ends with."""
        return self.thread_close.replace("{number}", str(number))

    def joining(self, returned: tuple[str | Piece, ...] = ()) -> tuple[Part, ...]:
        """Returns the continuation of the text after its threads, given what they returned."""
        if self.returned is None:
            return (self.join,)
        before, _, after = self.join.partition("{returned}")
        opening, closing = self.returned
        parts: list[Part] = [before]
        for text in returned:
            parts += [f"\n{opening}", text, closing]
        return (*parts, after)


def _planned(name: FormatName, source: str, tags: tuple[str, str, str], **more: Any) -> Format:
    """Makes the row of a format with numbered threads, from the tags of its plan, of an item and of a thread."""
    plan, item, thread = tags
    return Format(
        name=name,
        source=source,
        plan=_around(plan),
        item=_around(item),
        announce=f"</{plan}>",
        thread_open=f"\n<{thread}>\n{{number}}:",
        thread_close=f"</{thread}>",
        **more,
    )


def _around(word: str) -> tuple[str, str]:
    return f"<{word}>", f"</{word}>"


_ROWS = (
    _planned(
        "threadweaver", "arXiv 2512.07843", ("Outlines", "Outline", "Thread"), begin="<Parallel>", join="\n</Parallel>"
    ),
    _planned(
        "multiverse",
        "arXiv 2506.09991",
        ("Goal", "Outline", "Path"),
        begin="<Parallel>",
        join="\n<Conclusion>",
        end="</Conclusion>\n</Parallel>",
        nested=True,
    ),
    _planned("npr", "arXiv 2512.07461", ("guideline", "plan", "step"), join="\n<takeaway>", end="</takeaway>"),
    Format(
        name="parallel-r1",
        source="arXiv 2509.07980",
        begin="<Parallel>",
        announce="<Parallel>",
        thread_open="\n<Path>",
        thread_close="</Path>",
        join="\n</Parallel>\n<Summary>",
        end="</Summary>",
    ),
    Format(
        name="parathinker",
        source="arXiv 2509.04475",
        thread_open="<think{number}>",
        thread_close="</think{number}>",
        join="<summary>",
        end="</summary>",
        marks=True,
    ),
    # The paper calls its operations spawn(msgs) and join(msg), and its texts phrase them in terms of one puzzle.
    # Here they are tags: messages are items, and a child ends with what it returns, which its parent reads.
    Format(
        name="apr",
        source="arXiv 2504.15466",
        plan=_around("Spawn"),
        item=_around("Message"),
        announce="</Spawn>",
        thread_open="\n<Child>\n",
        thread_close="</Return>",
        join="\n<Join>{returned}\n</Join>",
        returned=_around("Return"),
        nested=True,
    ),
)

#: Formats by name.
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
