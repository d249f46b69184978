"""Holds the shared parts of thinking methods: concurrent calls, samples in order, votes with their completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from partsong.reasoning.answers.votes import Ballot, voting_hint
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.budget import BudgetError
from partsong.reasoning.calls.call import Completion, Message, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.running_call import Halt
from partsong.reasoning.calls.tasks import cancel_all

__all__ = [
    "Poll",
    "Scorer",
    "answer_of",
    "await_score",
    "by_support",
    "answer_in",
    "draft_ends",
    "in_order",
    "together",
]

T = TypeVar("T")
#: Scores a completion, higher is better; may be async.
Scorer = Callable[[Completion], float | Awaitable[float]]


async def await_score(score: float | Awaitable[float]) -> float:
    """Returns a score and waits for it where needed: callables of users may be async."""
    return await score if isinstance(score, Awaitable) else score


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | None]:
    """Makes calls at the same time and returns their results in order; any error but the budget's cancels the rest.

    The result is None for calls beyond the budget.
    """

    async def within_budget(call: Coroutine[Any, Any, T]) -> T | None:
        with contextlib.suppress(BudgetError):
            return await call
        return None

    tasks = [asyncio.ensure_future(within_budget(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def in_order(
    run: Run,
    messages: Sequence[Message],
    num: int,
    *,
    width: int,
    path: Sequence[str],
    first: int = 0,
    waits: Sequence[str] = (),
    parameters: Parameters | None = None,
    halt: Halt | None = None,
) -> AsyncGenerator[tuple[int, Completion], None]:
    """Yields samples in the order of their numbers, so that no rule that reads them depends on speed.

    It draws `width` samples at the same time: sample i begins when sample i - width has been handed out. The first has
    the number `first` and waits for the calls in `waits`. It ends early when the budget is spent; closing it cancels
    the calls that still run. For the rest see `Run.samples`.
    """
    tasks: list[asyncio.Task[Completion]] = []
    ended: list[str] = []
    try:
        for place in range(num):
            while len(tasks) < min(num, place + width):
                # The last `width` samples handed out have waited for all before them.
                before = (*waits, *ended[-width:]) if len(tasks) >= width else waits
                number = first + len(tasks)
                call = run.call(messages, path=path, sample=number, parameters=parameters, waits=before, halt=halt)
                tasks.append(asyncio.ensure_future(call))
                # The call begins now, so that a run and its replay, where nothing takes time, leave the same record.
                await asyncio.sleep(0)
            try:
                completion = await tasks[place]
            except BudgetError:
                return
            ended.append(completion.source)
            yield first + place, completion
    finally:
        await cancel_all(tasks)


def by_support(drafts: Sequence[Completion], extract: Extract) -> list[Completion]:
    """Sorts drafts by how many others share their answer; those without an answer come last, ties keep their order."""
    votes = [vote_of(draft, extract) for draft in drafts]
    support = [0 if vote is None else votes.count(vote) for vote in votes]
    order = sorted(range(len(drafts)), key=lambda i: (-support[i], i))
    return [drafts[i] for i in order]


def draft_ends(drafts: Sequence[Completion], tokens: int) -> list[Piece]:
    """Cuts drafts to their ends, each to an equal share of a number of tokens; characters stand for tokens here."""
    share = tokens // len(drafts)
    kept = [min(1.0, share / max(1, draft.usage.completion)) for draft in drafts]
    return [
        Piece(draft.text[len(draft.text) - int(len(draft.text) * part) :], draft.source)
        for draft, part in zip(drafts, kept, strict=True)
    ]


def answer_of(run: Run, chosen: Completion | None, extract: Extract, stopped: str, **details: Any) -> Answer:
    """Returns the answer that one completion gives; None where there is no completion, or it ran out of tokens."""
    if chosen is None:
        return answer_in(run, "", (), extract, stopped, valid=False, **details)
    return answer_in(run, chosen.text, (chosen.source,), extract, stopped, valid=chosen.finish == "stop", **details)


def answer_in(
    run: Run, text: str, calls: Sequence[str], extract: Extract, stopped: str, *, valid: bool, **details: Any
) -> Answer:
    """Returns the answer found in a text that several calls wrote; None in a text that is not whole."""
    return Answer(
        answer=extract(text) if valid else None,
        text=text,
        calls=tuple(calls),
        stopped=stopped,
        summary=run.summary(calls),
        details=details,
    )


@dataclass(slots=True)
class Poll:
    """Holds votes and the completions they come from; `missing` has the numbers of the missing votes."""

    total: int
    extract: Extract
    ballot: Ballot = field(init=False)
    missing: set[int] = field(init=False)
    seen: dict[int, tuple[str | None, Completion]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ballot, self.missing = Ballot(self.total), set(range(self.total))

    def count(self, number: int, completion: Completion, weight: float = 1.0) -> str | None:
        """Counts the vote of a completion and returns it."""
        vote = vote_of(completion, self.extract)
        self.seen[number] = (vote, completion)
        self.ballot.add(number, vote, weight)
        self.missing.discard(number)
        return vote

    def decided(self, most: float = 1.0) -> bool:
        """Returns whether votes are missing and none of them, of weight `most`, can change the winner."""
        return bool(self.missing) and self.ballot.decided(self.missing, most)

    def answer(self, run: Run, stopped: str, **details: Any) -> Answer:
        """Returns the leading answer, with the text of the first sample that named it.

        Where no text names an answer, the first whole text stands for all, and ``details`` hold the ``texts``.
        """
        leader, samples = self.ballot.leader, [self.seen[number] for number in sorted(self.seen)]
        whole = [completion for _, completion in samples if completion.finish == "stop" and completion.text.strip()]
        named = [completion for vote, completion in samples if vote == leader] if leader is not None else whole
        votes: dict[str, Any] = {
            "shares": dict(self.ballot.shares()),
            "votes": self.ballot.counted,
            "spoilt": self.ballot.spoilt,
            "hint": voting_hint(self.ballot),
        }
        if leader is None and whole:
            votes |= {"texts": [completion.text for completion in whole], "hint": _no_vote(len(whole))}
        return answer_of(run, named[0] if named else None, self.extract, stopped, **votes, **details)


def _no_vote(texts: int) -> str:
    what = "the text names" if texts == 1 else f"none of the {texts} texts names"
    return f"no vote: {what} {'no' if texts == 1 else 'an'} answer that can be counted"
