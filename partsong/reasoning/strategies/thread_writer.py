"""Writes a text that parts into threads: a call until threads are announced, a call per thread, and on behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from partsong.reasoning.calls.budget import BudgetError
from partsong.reasoning.calls.call import Completion, Message, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.text_tree import Fork, Part, flat_text
from partsong.reasoning.strategies.parts import together
from partsong.reasoning.threads.formats import Format
from partsong.reasoning.threads.plans import ThreadPlan, announced, stop_of

__all__ = ["ThreadPlace", "Written", "ThreadWriter", "repeated_tokens"]


@dataclass(slots=True)
class Written:
    """What has been written of a text, and of the threads in it.

    Attributes:
        parts: the text.
        calls: that wrote it and its threads, in the order of reading.
        children: threads that stand apart.
        notes: what went otherwise than the format wants it, with the branch.
        finish: "stop", it is whole; "length", its tokens ran out; "budget", the run's did; empty while it is written.
        roots: calls that read nothing of it: the first, or those of its threads where it begins with a fork.
        last: the call that wrote its end; None where threads did.
        own: tokens it has written itself.
        segments: calls it has made itself.
    """

    parts: list[Part] = field(default_factory=list)
    calls: list[Completion] = field(default_factory=list)
    children: list[Written] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finish: Literal["", "stop", "length", "budget"] = ""
    roots: list[Completion] = field(default_factory=list)
    last: Completion | None = None
    own: int = 0
    segments: int = 0

    @property
    def all_calls(self) -> list[Completion]:
        """Its calls, and those of threads that stand apart."""
        return [*self.calls, *(call for child in self.children for call in child.all_calls)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadPlace:
    """Where a text is written.

    Attributes:
        chat: messages before it.
        before: the text up to the fork it is a thread of.
        opener: what it begins with.
        closer: what ends it; empty where it is no thread.
        mark: its thought embedding; 0 is none.
        path: of its calls.
        depth: forks around it.
    """

    chat: tuple[Message, ...]
    before: tuple[Part, ...] = ()
    opener: str = ""
    closer: str = ""
    mark: int = 0
    path: tuple[str, ...] = ()
    depth: int = 0

    def messages(self, own: Sequence[Part]) -> tuple[Message, ...]:
        """The chat a call goes on with when some of the text is there."""
        inside = (*([self.opener] if self.opener else []), *own)
        text = (*self.before, Fork((inside,), marks=(self.mark,))) if self.mark else (*self.before, *inside)
        # What stands apart is no text of this one.
        text = tuple(part for part in text if not (isinstance(part, Fork) and part.apart))
        return (*self.chat, Message("assistant", text)) if text else self.chat

    def called(self, words: str) -> str:
        """A note of what happened here."""
        return f"{'/'.join(self.path)}: {words}" if self.path else words


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadWriter:
    """What all texts of a question share; see `fork_join`.

    Attributes:
        run: makes the calls.
        form: of the threads.
        parameters: of the draws.
        num: threads of a fork where its text does not say.
        max_threads: most of a fork that is announced.
        max_forks: of a text.
        max_depth: forks within forks.
        thread_tokens: of a thread.
        child: the chat of a thread that stands apart, of its message.
    """

    run: Run
    form: Format
    parameters: Parameters
    num: int
    max_threads: int
    max_forks: int
    max_depth: int
    thread_tokens: int
    child: Callable[[Piece], Sequence[Message]]

    async def write(self, at: ThreadPlace, tokens: int) -> Written:
        """Writes a text to its end: in turn what the model says, and the threads it announces."""
        made = Written()
        if not self.form.announce and not at.depth:  # nobody announces them: they begin at once
            await self._fork(at, made, ThreadPlan())
        while not made.finish:
            await self._go_on(at, made, tokens)
        return made

    async def _go_on(self, at: ThreadPlace, made: Written, tokens: int) -> None:
        """Writes until threads are announced, and these, or to the end."""
        deep = self.max_depth if self.form.nested else 1
        stop = stop_of(self.form) if made.segments < self.max_forks and at.depth < deep else ""
        said = await self._say(at, made, tokens, stop)
        if said is None:
            return
        plan = announced(said.text, self.form) if stop else None
        made.parts.append(said)
        if plan is None:
            if not stop and self.form.announce and self.form.announce in said.text:
                made.notes.append(at.called("announces more threads than it may; they stay one text"))
            if at.closer and said.text and self._inside(made.parts):
                made.parts.append(at.closer)
            else:
                made.finish = "stop"
            return
        made.parts[-1:] = self._announcement(said, plan, stop)
        if plan.fault:
            made.notes.append(at.called(f"goes on in one text: {plan.fault}"))
        else:
            await self._fork(at, made, plan)

    async def _say(self, at: ThreadPlace, made: Written, tokens: int, stop: str) -> Piece | None:
        """One call; None where it does not come to an end."""
        if made.own >= tokens:
            made.finish = "length"
            return None
        stops = tuple(filter(None, (at.closer, stop)))
        asked = replace(self.parameters, max_tokens=tokens - made.own, stop=(*self.parameters.stop, *stops))
        try:
            chat, path = at.messages(made.parts), (*at.path, "text")
            said = await self.run.call(chat, path=path, sample=made.segments, parameters=asked)
        except BudgetError:
            made.finish = "budget"
            return None
        made.roots = made.roots or [said]
        made.calls.append(said)
        # Whatever an engine counts, a text that is asked for again and again comes to an end.
        made.last, made.segments, made.own = said, made.segments + 1, made.own + max(1, said.usage.completion)
        # Some servers leave the stop string in the text.
        ends = [place for place in map(said.text.find, stops) if place >= 0]
        piece = Piece(said.text[: min(ends)], said.source) if ends else said.piece
        if said.reasoning and not said.text:
            words = "the engine keeps what was said apart as hidden reasoning, where threads cannot be seen"
            made.notes.append(at.called(words))
        if said.finish == "stop":
            return piece
        made.parts.append(piece)
        made.finish = "length"
        return None

    def _inside(self, parts: Sequence[Part]) -> bool:
        """Whether a tag that seems to end a thread ends something within it, which it writes all by itself."""
        text, form = flat_text(parts), self.form
        begin, end = (
            ("<Join>", "</Join>") if form.apart else (form.thread_open.strip().partition("\n")[0], form.closer(0))
        )
        return text.count(begin) > text.count(end)

    def _announcement(self, said: Piece, plan: ThreadPlan, stop: str) -> tuple[Part, ...]:
        """The text with the tag that ended it, which engines leave out."""
        if self.form.plan is not None:
            return (said, stop)
        cut = len(said.text) - (2 if plan.fault else 1)
        return (Piece(said.text[:cut], said.source), said.text[cut:] + stop)

    async def _fork(self, at: ThreadPlace, made: Written, plan: ThreadPlan) -> None:
        """Writes the threads of a fork, all at the same time, and joins them."""
        goals, number = plan.goals or ("",) * self.num, max(made.segments - 1, 0)
        if len(goals) > self.max_threads and plan.goals:
            words = f"fork {number} announces {len(goals)} threads; the first {self.max_threads} are written"
            made.notes.append(at.called(words))
            goals = goals[: self.max_threads]
        places = [self._place(at, made, f"fork {number}", i, goal) for i, goal in enumerate(goals, 1)]
        found = await together(self.write(place, self.thread_tokens) for place in places)
        threads = [thread for thread in found if thread is not None]
        made.roots = made.roots or [root for thread in threads for root in thread.roots]
        for place, thread in zip(places, threads, strict=True):
            made.notes += thread.notes
            if thread.finish == "length":
                made.notes.append(place.called("ran out of tokens; it is closed where it stands"))
            made.children += [thread] if self.form.apart else thread.children
            made.calls += [] if self.form.apart else thread.calls
        texts = [
            (place.opener or goal, *thread.parts, self.form.closer(i))
            for i, (place, goal, thread) in enumerate(zip(places, goals, threads, strict=True), 1)
        ]
        marks = tuple(place.mark for place in places) if self.form.marks else ()
        made.parts.append(Fork(tuple(texts), marks, apart=self.form.apart))
        made.last = None
        if any(thread.finish == "budget" for thread in threads):
            made.finish = "budget"
            return
        made.parts += self.form.joining(tuple(self._returned(thread) for thread in threads) if self.form.apart else ())

    def _place(self, at: ThreadPlace, made: Written, fork: str, number: int, goal: str) -> ThreadPlace:
        """Where a thread of a fork is written."""
        path, depth = (*at.path, fork, f"thread {number}"), at.depth + 1
        if self.form.apart:
            assert made.last is not None
            chat = tuple(self.child(Piece(goal, made.last.source)))
            return ThreadPlace(chat=chat, closer=self.form.closer(number), path=path, depth=depth)
        opening = (at.opener,) if at.opener else ()
        return ThreadPlace(
            chat=at.chat,
            before=(*at.before, *opening, *made.parts),
            opener=self.form.opener(number),
            closer=self.form.closer(number),
            mark=number if self.form.marks else 0,
            path=path,
            depth=depth,
        )

    def _returned(self, thread: Written) -> Piece:
        """What a thread that stands apart returns: all it says where it does not mark anything."""
        assert self.form.returned is not None
        text = flat_text(thread.parts)
        return Piece(text.rpartition(self.form.returned[0])[2].strip(), thread.calls[-1].source)


def repeated_tokens(text: Written) -> int | None:
    """Prompt tokens that had been computed for this text before and were computed again.

    The last call reads the whole text, each token once. What all calls computed of their prompts beyond that, but for
    what had been drawn, was computed again. Keys the engine had before the text began are no gain of the text's.

    Returns:
        0 where nothing was; None where no call has read all of the text.
    """
    if text.last is None or not text.calls:
        return None
    computed = sum(call.usage.prompt - call.usage.cached for call in text.calls)
    computed += min(call.usage.cached for call in text.roots)
    drawn = sum(_kept(call) for call in text.calls if call is not text.last)
    inside = [repeated_tokens(child) for child in text.children]
    if any(found is None for found in inside):
        return None
    return max(0, computed - (text.last.usage.prompt - drawn)) + sum(found or 0 for found in inside)


def _kept(call: Completion) -> int:
    """Tokens of an answer whose keys are there when it ends: those of its text, but for the very last token drawn."""
    if call.tokens is None:
        return call.usage.completion
    return min(len(call.tokens), call.usage.completion - 1)
