"""How texts of threads are written: one row of data per format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from partsong.reasoning.calls.text_tree import Part, Piece

__all__ = ["FORMATS", "Format", "FormatName"]

#: Names of the formats.
FormatName = Literal["threadweaver", "multiverse", "npr", "parallel-r1", "parathinker", "apr"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    r"""The tags of a format.

    A model announces threads by writing a plan, an item per thread, between `plan`'s tags; where `plan` is None it
    writes `announce` alone, or nothing where that is empty too, and somebody else says how many threads there are. Each
    thread begins with `thread_open` and ends with `thread_close`; behind the last one the text goes on with `join`.

    Attributes:
        name: as users call it.
        source: paper.
        begin: tag before the plan.
        plan: tags around the items.
        item: tags around an item. Where threads are numbered it begins with its number and a colon.
        announce: what stops the main text: threads begin.
        thread_open: what a thread begins with; ``{number}`` counts from 1.
        thread_close: what ends a thread; ``{number}`` likewise.
        join: what the text goes on with; ``{returned}`` is what the threads return.
        end: tags that close the whole fork, in order, written by the model.
        marks: whether threads have thought embeddings.
        nested: whether threads may fork.
        returned: tags around what a thread returns, where threads stand apart: each reads its item alone, and of what
            it writes only that is read.

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
        """Whether threads read nothing of the text they were announced in."""
        return self.returned is not None

    @property
    def numbered(self) -> bool:
        """Whether the items of a plan have numbers."""
        return self.plan is not None and "{number}" in self.thread_open

    def opener(self, number: int) -> str:
        """What thread `number`, from 1, begins with."""
        return self.thread_open.replace("{number}", str(number))

    def closer(self, number: int) -> str:
        """What thread `number`, from 1, ends with."""
        return self.thread_close.replace("{number}", str(number))

    def joining(self, returned: tuple[str | Piece, ...] = ()) -> tuple[Part, ...]:
        """What the text goes on with behind threads that returned something."""
        if self.returned is None:
            return (self.join,)
        before, _, behind = self.join.partition("{returned}")
        opening, closing = self.returned
        parts: list[Part] = [before]
        for text in returned:
            parts += [f"\n{opening}", text, closing]
        return (*parts, behind)


_ROWS = (
    Format(
        name="threadweaver",
        source="arXiv 2512.07843",
        begin="<Parallel>",
        plan=("<Outlines>", "</Outlines>"),
        item=("<Outline>", "</Outline>"),
        announce="</Outlines>",
        thread_open="\n<Thread>\n{number}:",
        thread_close="</Thread>",
        join="\n</Parallel>",
    ),
    Format(
        name="multiverse",
        source="arXiv 2506.09991",
        begin="<Parallel>",
        plan=("<Goal>", "</Goal>"),
        item=("<Outline>", "</Outline>"),
        announce="</Goal>",
        thread_open="\n<Path>\n{number}:",
        thread_close="</Path>",
        join="\n<Conclusion>",
        end="</Conclusion>\n</Parallel>",
        nested=True,
    ),
    Format(
        name="npr",
        source="arXiv 2512.07461",
        plan=("<guideline>", "</guideline>"),
        item=("<plan>", "</plan>"),
        announce="</guideline>",
        thread_open="\n<step>\n{number}:",
        thread_close="</step>",
        join="\n<takeaway>",
        end="</takeaway>",
    ),
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
    # The paper calls its operations spawn(msgs) and join(msg), and its texts spell them in the words of one puzzle.
    # Here they are tags: the messages are the items, a child ends with what it returns, and that its parent reads.
    Format(
        name="apr",
        source="arXiv 2504.15466",
        plan=("<Spawn>", "</Spawn>"),
        item=("<Message>", "</Message>"),
        announce="</Spawn>",
        thread_open="\n<Child>\n",
        thread_close="</Return>",
        join="\n<Join>{returned}\n</Join>",
        returned=("<Return>", "</Return>"),
        nested=True,
    ),
)

#: Formats by name.
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
