"""Writes a text that splits into threads: one call until it announces them, one per thread, then calls for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from partsong.reasoning.calls.budget import BudgetError
from partsong.reasoning.calls.call import Completion, Message, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.text_tree import Fork, Part, flat_text
from partsong.reasoning.strategies.parts import together
from partsong.reasoning.strategies.thread_text import ThreadPlace, ThreadText
from partsong.reasoning.threads.formats import Format
from partsong.reasoning.threads.plans import ThreadPlan, read_announcement, stop_of

__all__ = ["ThreadWriter", "repeated_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadWriter:
    """Writes the texts of one question; for its settings see `fork_join`.

    `child_chat` makes the chat of a separate thread from its message.
    """

    run: Run
    form: Format
    parameters: Parameters
    num: int
    max_threads: int
    max_forks: int
    max_depth: int
    thread_tokens: int
    child_chat: Callable[[Piece], Sequence[Message]]

    async def write(self, at: ThreadPlace, tokens: int) -> ThreadText:
        """Writes a text to its end, alternating between the model's text and the threads it announces."""
        text = ThreadText()
        if not self.form.announce and not at.depth:  # the threads are not announced: they begin at once
            await self._write_fork(at, text, ThreadPlan())
        while not text.finish:
            await self._continue(at, text, tokens)
        return text

    async def _continue(self, at: ThreadPlace, text: ThreadText, tokens: int) -> None:
        """Writes on until the text ends, or until it announces threads, and then writes these."""
        max_depth = self.max_depth if self.form.nested else 1
        stop = stop_of(self.form) if text.own_calls < self.max_forks and at.depth < max_depth else ""
        piece = await self._call(at, text, tokens, stop)
        if piece is None:
            return
        plan = read_announcement(piece.text, self.form) if stop else None
        text.parts.append(piece)
        if plan is None:
            if not stop and self.form.announce and self.form.announce in piece.text:
                text.notes.append(at.note("announces more threads than it may; they stay one text"))
            if at.closer and piece.text and self._is_inside(text.parts):
                text.parts.append(at.closer)
            else:
                text.finish = "stop"
            return
        text.parts[-1:] = self._announcement(piece, plan, stop)
        if plan.fault:
            text.notes.append(at.note(f"goes on in one text: {plan.fault}"))
        else:
            await self._write_fork(at, text, plan)

    async def _call(self, at: ThreadPlace, text: ThreadText, tokens: int, stop: str) -> Piece | None:
        """Makes one call; returns None if the model does not finish."""
        if text.own_tokens >= tokens:
            text.finish = "length"
            return None
        stops = tuple(filter(None, (at.closer, stop)))
        limits = replace(self.parameters, max_tokens=tokens - text.own_tokens)
        if stops:
            limits = replace(limits, stop=(*limits.stop, *stops), stop_in_thoughts=True)
        try:
            chat, path = at.messages(text.parts), (*at.path, "text")
            completion = await self.run.call(chat, path=path, sample=text.own_calls, parameters=limits)
        except BudgetError:
            text.finish = "budget"
            return None
        text.roots = text.roots or [completion]
        text.calls.append(completion)
        text.last, text.own_calls = completion, text.own_calls + 1
        # At least one, so that the text ends even if an engine counts no tokens.
        text.own_tokens += max(1, completion.usage.completion)
        # Some servers leave the stop string in the text.
        ends = [place for place in map(completion.text.find, stops) if place >= 0]
        piece = Piece(completion.text[: min(ends)], completion.source) if ends else completion.piece
        if completion.reasoning and not completion.text:
            words = "the engine keeps the text apart as hidden reasoning, where threads cannot be seen"
            text.notes.append(at.note(words))
        if completion.finish == "stop":
            return piece
        text.parts.append(piece)
        text.finish = "length"
        return None

    def _is_inside(self, parts: Sequence[Part]) -> bool:
        """Returns whether the tag that ended a thread closes something within it, which the thread wrote by itself."""
        text, form = flat_text(parts), self.form
        opening = "<Join>" if form.apart else form.thread_open.strip().partition("\n")[0]
        closing = "</Join>" if form.apart else form.closer(0)
        return text.count(opening) > text.count(closing)

    def _announcement(self, piece: Piece, plan: ThreadPlan, stop: str) -> tuple[Part, ...]:
        """Adds the tag that ended a text, which engines leave out."""
        if self.form.plan is not None:
            return (piece, stop)
        cut = len(piece.text) - (2 if plan.fault else 1)
        return (Piece(piece.text[:cut], piece.source), piece.text[cut:] + stop)

    async def _write_fork(self, at: ThreadPlace, text: ThreadText, plan: ThreadPlan) -> None:
        """Writes the threads of a fork, all at the same time, and joins them."""
        goals, number = plan.goals or ("",) * self.num, max(text.own_calls - 1, 0)
        if len(goals) > self.max_threads and plan.goals:
            words = f"fork {number} announces {len(goals)} threads; the first {self.max_threads} are written"
            text.notes.append(at.note(words))
            goals = goals[: self.max_threads]
        places = [self._place(at, text, f"fork {number}", i, goal) for i, goal in enumerate(goals, 1)]
        results = await together(self.write(place, self.thread_tokens) for place in places)
        threads = [thread for thread in results if thread is not None]
        self._add_threads(text, places, threads)
        texts = [
            (place.opener or goal, *thread.parts, self.form.closer(i))
            for i, (place, goal, thread) in enumerate(zip(places, goals, threads, strict=True), 1)
        ]
        marks = tuple(place.mark for place in places) if self.form.marks else ()
        text.parts.append(Fork(tuple(texts), marks, apart=self.form.apart))
        if any(thread.finish == "budget" for thread in threads):
            text.finish = "budget"
            return
        text.parts += self.form.joining(tuple(self._returned(thread) for thread in threads) if self.form.apart else ())

    def _add_threads(self, text: ThreadText, places: Sequence[ThreadPlace], threads: Sequence[ThreadText]) -> None:
        """Adds calls and notes of threads to the text they are threads of."""
        text.last = None
        text.roots = text.roots or [root for thread in threads for root in thread.roots]
        for place, thread in zip(places, threads, strict=True):
            text.notes += thread.notes
            if thread.finish == "length":
                text.notes.append(place.note("ran out of tokens; it is closed where it stands"))
            text.children += [thread] if self.form.apart else thread.children
            text.calls += [] if self.form.apart else thread.calls

    def _place(self, at: ThreadPlace, text: ThreadText, fork: str, number: int, goal: str) -> ThreadPlace:
        """Returns the place where a thread of a fork is written."""
        path, depth = (*at.path, fork, f"thread {number}"), at.depth + 1
        if self.form.apart:
            assert text.last is not None
            chat = tuple(self.child_chat(Piece(goal, text.last.source)))
            return ThreadPlace(chat=chat, closer=self.form.closer(number), path=path, depth=depth)
        opening = (at.opener,) if at.opener else ()
        return ThreadPlace(
            chat=at.chat,
            before=(*at.before, *opening, *text.parts),
            opener=self.form.opener(number),
            closer=self.form.closer(number),
            mark=number if self.form.marks else 0,
            path=path,
            depth=depth,
        )

    def _returned(self, thread: ThreadText) -> Piece:
        """Returns what a separate thread returns: the part that it marks, or all its text if it marks none."""
        assert self.form.returned is not None
        text = flat_text(thread.parts)
        return Piece(text.rpartition(self.form.returned[0])[2].strip(), thread.calls[-1].source)


def repeated_tokens(text: ThreadText) -> int | None:
    """Counts the prompt tokens of a text that were computed again; None where no call has read all of the text.

    The last call reads the whole text, each token once. All other prompt tokens that the calls computed, less
    those that calls had drawn, were computed again. Keys that the engine held before the text began count as computed.
    """
    if text.last is None or not text.calls:
        return None
    computed = sum(call.usage.prompt - call.usage.cached for call in text.calls)
    computed += min(call.usage.cached for call in text.roots)
    drawn = sum(_kept_tokens(call) for call in text.calls if call is not text.last)
    repeated = [max(0, computed - (text.last.usage.prompt - drawn)), *map(repeated_tokens, text.children)]
    return None if None in repeated else sum(filter(None, repeated))


def _kept_tokens(call: Completion) -> int:
    """Counts the tokens of an answer whose keys are there when it ends: all of its text but the last token drawn."""
    if call.tokens is None:
        return call.usage.completion
    return min(len(call.tokens), call.usage.completion - 1)
