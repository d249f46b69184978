"""Runs workers that write side by side: decides who reads what next, when a step ends, and when all stop."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from partsong.errors import ArgumentError
from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.kernels.no_token import why_no_token
from partsong.reasoning.calls.call import Completion, Parameters, Usage
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.hogwild.attention import Feed, forward
from partsong.reasoning.hogwild.cache import BlockStore, CacheBlock
from partsong.reasoning.hogwild.layouts import Table, WorkerLayout
from partsong.reasoning.hogwild.prompts import HogwildPrompts, fill
from partsong.reasoning.hogwild.rotary import rotary_of
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.stops import AnswerText
from partsong.seeds import derive

__all__ = ["WorkerReport", "WorkerText", "HogwildWriter", "Writing"]

#: How many tokens of the prompt are read at a time. Each is rotated once per page, so more would need much memory.
_CHUNK = 128
#: The end of a step: an empty line after the end of a sentence.
_PARAGRAPH = re.compile(r"[.!?…。][^\w\s]*[ \t]*\n[ \t]*\n\s*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerText:
    """Says what workers do together.

    Attributes:
        prompt: token ids that all start from.
        names: the workers' names, one for each.
        layout: what each of them sees.
        texts: headings, labels and questions.
        parameters: how each worker's tokens are drawn; `max_tokens` is each worker's own.
        seed: worker w draws from ``derive(seed, "hogwild", w)``.
        probe_every: tokens after which a worker is asked at the end of a paragraph whether its work is redundant, or
            after twice as many in the middle of one; 0 never asks.
        answer_tokens: how many tokens one worker has to name a result once all have run out; 0 asks for no result.
        ends: tokens that end a worker's text.
        concludes: returns whether a worker's text names the result, and so ends all work. It is called with the text,
            and whether that has ended, whenever a brace closes and when the text ends.
    """

    prompt: Sequence[int]
    names: Sequence[str]
    layout: WorkerLayout
    texts: HogwildPrompts
    parameters: Parameters
    seed: int
    probe_every: int
    answer_tokens: int
    ends: frozenset[int]
    concludes: Callable[[str, bool], bool]


class WorkerReport(NamedTuple):
    """Reports what a worker has written in a step.

    Attributes:
        worker: its number.
        text: the new text, including questions to the worker.
        tokens: how many tokens it has drawn so far.
    """

    worker: int
    text: str
    tokens: int


@dataclass(slots=True, eq=False)
class HogwildWriter:
    """Describes a worker.

    Attributes:
        number: its number.
        seed: the seed of its draws.
        reader: turns its tokens into text.
        left: how many tokens it may still draw.
        pending: tokens that go into its block next.
        opening: tokens that begin its next block; None while the step goes on.
        text: its text, without labels.
        reported: how many characters of the text were reported.
        begin: where in the text the paragraph begins.
        answer_from: where in the text the result may begin.
        drawn: how many tokens it has drawn.
        inserted: how many tokens of labels and questions it has read.
        steps: how many steps it has begun.
        since_probe: how many tokens it has drawn since the last question.
        finish: how it ended; None while it writes.
        greedy: whether it must name the result now.
    """

    number: int
    seed: int
    reader: AnswerText
    left: int
    pending: list[int] = field(default_factory=list)
    opening: list[int] | None = None
    text: str = ""
    reported: int = 0
    begin: int = 0
    answer_from: int = 0
    drawn: int = 0
    inserted: int = 0
    steps: int = 1
    since_probe: int = 0
    finish: Literal["stop", "length", "halted", "cancelled"] | None = None
    greedy: bool = False


class Writing:
    """Lets workers write together.

    `compute` may run in another thread, while nothing else is called. `take` uses the tokenizer, so it must run in the
    tokenizer's thread.

    Args:
        model: the model that computes.
        tokenizer: the model's tokenizer, of transformers.
        work: what to do.

    Attributes:
        store: all keys.
        table: who sees which blocks.
        writers: the workers, by number.
        steps: the number of forwards in which workers wrote, which is the critical path.
        over: whether all have stopped.

    Raises:
        ArgumentError: the prompt leaves no room.
        UnsupportedError: the model's positions are not rotary.
    """

    def __init__(self, model: LocalModel, tokenizer: Any, work: WorkerText) -> None:
        self.model, self.work, self._tokenizer = model, work, tokenizer
        self._rotary = rotary_of(model)
        self._together = len(work.names) > 1
        self.store = BlockStore(model)
        blocks = [self.store.block() for _ in range(3 + len(work.names))]
        self.table = Table[CacheBlock](
            layout=work.layout, prompt=blocks[0], others=blocks[1], own=blocks[2], current=[*blocks[3:]]
        )
        self.writers = [
            HogwildWriter(number, derive(work.seed, "hogwild", number), self._reader(), work.parameters.max_tokens)
            for number in range(len(work.names))
        ]
        self.steps, self.over = 0, False
        self._answering = self._concluded = self._full = False
        self._reading: list[HogwildWriter] = []
        self._reads = deque(self._common())
        self.prefill = sum(len(feed.tokens) for feed in self._reads)
        for writer in self.writers:
            # A single worker continues right after the prompt, whose last token is fed as the worker's own.
            writer.pending = self._label(writer) if self._together else [work.prompt[-1]]
            writer.inserted = len(writer.pending)
        self._finish = self._ids(fill(work.texts.finish))
        # Positions reserved for the answer at the end. Every worker may have written one token more by then.
        self._reserve = work.answer_tokens and work.answer_tokens + len(self._finish) + len(work.names)
        self._check_room()

    # --- turns --------------------------------------------------------------------------------------------------------

    def turn(self) -> list[WorkerReport]:
        """Makes a step of every worker that writes."""
        return self.take(self.compute())

    def compute(self) -> list[int]:
        """Reads a part of the prompt, or lets each worker read its last token and draw the next."""
        with torch.inference_mode():
            if self._reads:
                forward(self.model, self._rotary, self.store, [self._reads.popleft()])
                return []
            self._reading = [writer for writer in self.writers if writer.finish is None]
            self._full = self._overflow(self._reading)
            if self._full:
                return []
            self.steps += 1
            logits = forward(self.model, self._rotary, self.store, self._feeds(self._reading))
            parameters = self.work.parameters
            heat = [0.0 if writer.greedy else parameters.temperature for writer in self._reading]
            tokens = draw(
                logits,
                [TokenDraw(t, parameters.top_p, w.seed, w.drawn) for t, w in zip(heat, self._reading, strict=True)],
            )
            for writer, token in zip(self._reading, tokens, strict=True):
                # The others read what it writes, so nobody can go on.
                if token < 0:
                    raise EngineError(why_no_token(token, writer.number, self.prefill + writer.inserted + writer.drawn))
            return tokens

    def take(self, tokens: Sequence[int]) -> list[WorkerReport]:
        """Takes what `compute` drew; reports each worker's new text."""
        if tokens or self._full:
            for writer, token in zip(self._reading, tokens, strict=False):
                writer.pending = []
                if writer.finish is None:
                    self._take(writer, token)
            if self._full:
                self._end_all("length")
            self._settle()
        return [self._report(writer) for writer in self._reading if tokens]

    def stop(self, number: int) -> None:
        """Lets a worker leave; the others still see what it has written."""
        self.writers[number].finish = "cancelled"
        self._settle()

    def completion(self, number: int) -> Completion | None:
        """Returns what a worker has written; None while it writes, and for one that was stopped."""
        writer = self.writers[number]
        if not self.over or writer.finish is None or writer.finish == "cancelled":
            return None
        # The prompt is read once, and counted with the first worker.
        usage = Usage(
            prompt=self.prefill + writer.inserted, cached=self.prefill if number else 0, completion=writer.drawn
        )
        return Completion(text=writer.text, finish=writer.finish, usage=usage)

    # --- what is read -------------------------------------------------------------------------------------------------

    def _common(self) -> list[Feed]:
        """Lists what all see: the prompt, then the headings, each of which sees everything before it."""
        table, texts, prompt = self.table, self.work.texts, list(self.work.prompt)
        if not self._together:
            prompt = prompt[:-1]
        elif self.work.layout.history:
            prompt += self._ids(texts.history)
        parts: list[tuple[tuple[CacheBlock, ...], list[int]]] = [((table.prompt,), prompt)]
        if self._together:
            shown = (table.prompt, table.others) if self.work.layout.live else (table.prompt,)
            if self.work.layout.live:
                parts.append((shown, self._ids(texts.others)))
            parts.append(((*shown, table.own), self._ids(texts.own)))
        return [
            Feed(view, ids[first : first + _CHUNK], asked=False)
            for view, ids in parts
            for first in range(0, len(ids), _CHUNK)
        ]

    def _feeds(self, writers: Sequence[HogwildWriter]) -> list[Feed]:
        """Lists the next tokens of workers. Steps that end with them go into the history before any worker looks."""
        table, feeds = self.table, list[Feed]()
        closing = [writer for writer in writers if writer.opening is not None]
        for writer in closing:
            feeds.append(Feed(table.view(writer.number), writer.pending, asked=False))
        for writer in closing:
            table.finish(writer.number, self.store.block())
            writer.pending, writer.opening = writer.opening or [], None
        return feeds + [Feed(table.view(writer.number), writer.pending) for writer in writers]

    def _overflow(self, writers: Sequence[HogwildWriter]) -> bool:
        """Returns whether a view might not fit into the model's context after the next step."""
        views = [self.table.view(writer.number) for writer in writers]
        longest = max(sum(block.length for block in view) for view in views)
        new = sum(len(writer.pending) + len(writer.opening or ()) for writer in writers)
        if not self.work.layout.live:
            # Text that was private until now becomes visible to the others.
            new += sum(view[-1].length for view, writer in zip(views, writers, strict=True) if writer.opening)
        return longest + new > self.model.context - (0 if self._answering else self._reserve)

    def _check_room(self) -> None:
        needed = self.prefill + sum(len(writer.pending) for writer in self.writers) + self._reserve
        if needed >= self.model.context:
            raise ArgumentError(
                f"prompt, headings and the answer's {self.work.answer_tokens} tokens take {needed} positions, and the "
                f"model's context has {self.model.context}: shorten the prompt, or use fewer workers or answer_tokens"
            )

    # --- what is written ----------------------------------------------------------------------------------------------

    def _take(self, writer: HogwildWriter, token: int) -> None:
        ended, new = token in self.work.ends, ""
        writer.drawn, writer.left, writer.since_probe = writer.drawn + 1, writer.left - 1, writer.since_probe + 1
        if not ended:
            writer.pending = [token]
            new = writer.reader.push(token)
            writer.text += new
        last = ended or (writer.greedy and not writer.left)
        if (last or "}" in new) and self.work.concludes(writer.text[writer.answer_from :], last):
            writer.finish, self._concluded = "stop", True
            self._end_all("halted")
        elif ended and not writer.greedy:
            writer.finish = "stop"
            if self._together and self.work.layout.history:
                self.table.finish(writer.number, None)
        elif last or not writer.left:
            writer.finish = "length"
        elif self._together and not writer.greedy:
            self._turn_page(writer, "\n" in new)

    def _turn_page(self, writer: HogwildWriter, line: bool) -> None:
        """Ends the step if a paragraph has ended, and asks about redundancy when it is time."""
        every = self.work.probe_every
        paragraph = line and _PARAGRAPH.search(writer.text, writer.begin) is not None
        due = every > 0 and writer.since_probe >= (every if paragraph else 2 * every)
        if due and not paragraph:
            self._insert(writer, writer.pending, "\n\n", visible=True)
        if not (due or paragraph):
            return
        into = writer.pending
        if self.work.layout.history:
            writer.steps += 1
            writer.opening = into = self._label(writer)
        if due:
            writer.since_probe = 0
            self._insert(writer, into, fill(self.work.texts.probe), visible=True)
        writer.begin, writer.reader = len(writer.text), self._reader()

    def _settle(self) -> None:
        """Decides whether all is over, or one worker has to answer for all."""
        writing = [writer for writer in self.writers if writer.finish is None]
        if writing:
            return
        there = [writer for writer in self.writers if writer.finish != "cancelled"]
        if self._concluded or self._answering or not self.work.answer_tokens or not there:
            self.over = True
            return
        self._answering, writer = True, there[0]
        if self.table.current[writer.number] is None:
            self.table.current[writer.number] = self.store.block()
        writer.answer_from = len(writer.text)
        into = writer.pending if writer.opening is None else writer.opening
        self._insert(writer, into, fill(self.work.texts.finish), visible=True)
        writer.finish, writer.greedy, writer.left, writer.reader = None, True, self.work.answer_tokens, self._reader()

    def _end_all(self, finish: Literal["length", "halted"]) -> None:
        for writer in self.writers:
            writer.finish = writer.finish or finish

    # --- text ---------------------------------------------------------------------------------------------------------

    def _label(self, writer: HogwildWriter) -> list[int]:
        tokens: list[int] = []
        name = self.work.names[writer.number]
        self._insert(writer, tokens, fill(self.work.texts.label, name=name, step=str(writer.steps)))
        return tokens

    def _insert(self, writer: HogwildWriter, tokens: list[int], text: str, *, visible: bool = False) -> None:
        """Adds a text that the worker has not drawn to its tokens, and if it is visible, to its text as well."""
        ids = self._ids(text)
        tokens += ids
        writer.inserted += len(ids)
        writer.text += text if visible else ""

    def _report(self, writer: HogwildWriter) -> WorkerReport:
        new, writer.reported = writer.text[writer.reported :], len(writer.text)
        return WorkerReport(writer.number, new, writer.drawn)

    def _reader(self) -> AnswerText:
        return AnswerText(self._tokenizer)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids) if text else []
