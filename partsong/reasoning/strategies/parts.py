"""What strategies share: calls made together, samples in order, votes and the completions behind them."""

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
from partsong.reasoning.calls.running_call import Partial

__all__ = [
    "Halt",
    "Poll",
    "Scorer",
    "answered",
    "by_support",
    "cancelled",
    "concluded",
    "ends",
    "in_order",
    "now",
    "together",
]

T = TypeVar("T")
#: Worth of a completion, higher is better; may be awaited.
Scorer = Callable[[Completion], float | Awaitable[float]]
#: Whether enough of a call was read.
Halt = Callable[[Partial], bool]


async def now(value: float | Awaitable[float]) -> float:
    """A score, waited for where that is needed: callables of users may be async."""
    return await value if isinstance(value, Awaitable) else value


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | None]:
    """Makes calls at the same time and waits for all.

    Args:
        calls: coroutines.

    Returns:
        Their results in order; None for those the budget had nothing left for. Any other error cancels the rest.
    """

    async def kept(call: Coroutine[Any, Any, T]) -> T | None:
        with contextlib.suppress(BudgetError):
            return await call
        return None

    tasks = [asyncio.ensure_future(kept(call)) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels what still runs and waits until it has ended."""
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def as_they_end(tasks: Sequence[asyncio.Task[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Number and result of each task, in the order of ending; also of those that end in the same moment."""
    ended: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    numbers = {task: number for number, task in enumerate(tasks)}
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    for _ in tasks:
        task = await ended.get()
        yield numbers[task], task.result()


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
    """Samples in the order of their numbers, at most `width` ahead: no rule that reads them depends on speed.

    Args:
        run: makes the calls.
        messages: the prompt.
        num: samples.
        width: samples under way; sample i begins when sample i - width has been handed out.
        path: of the branch.
        first: number of the first sample.
        waits: calls that had to end before the first could begin.
        parameters: of the draws.
        halt: as of `Run.call`.

    Yields:
        Number and completion. It ends early where the budget does; closing it cancels what is under way.
    """
    tasks: list[asyncio.Task[Completion]] = []
    ended: list[str] = []
    try:
        for place in range(num):
            while len(tasks) < min(num, place + width):
                # The last `width` handed out waited for all before them.
                before = (*waits, *ended[-width:]) if len(tasks) >= width else waits
                number = first + len(tasks)
                call = run.call(messages, path=path, sample=number, parameters=parameters, waits=before, halt=halt)
                tasks.append(asyncio.ensure_future(call))
                # It begins now, so that the record of a run and of its replay, where nothing takes time, are the same.
                await asyncio.sleep(0)
            try:
                completion = await tasks[place]
            except BudgetError:
                return
            ended.append(completion.source)
            yield first + place, completion
    finally:
        await cancelled(tasks)


def by_support(drafts: Sequence[Completion], extract: Extract) -> list[Completion]:
    """Drafts by how many others share their answer; those without an answer last, ties in order."""
    votes = [vote_of(draft, extract) for draft in drafts]
    support = [0 if vote is None else votes.count(vote) for vote in votes]
    order = sorted(range(len(drafts)), key=lambda i: (-support[i], i))
    return [drafts[i] for i in order]


def ends(drafts: Sequence[Completion], tokens: int) -> list[Piece]:
    """The ends of drafts, each cut to its share of some tokens; by characters, for a text has no other measure."""
    share = tokens // len(drafts)
    kept = [min(1.0, share / max(1, draft.usage.completion)) for draft in drafts]
    return [
        Piece(draft.text[len(draft.text) - int(len(draft.text) * part) :], draft.source)
        for draft, part in zip(drafts, kept, strict=True)
    ]


def answered(run: Run, chosen: Completion | None, extract: Extract, stopped: str, **details: Any) -> Answer:
    """The answer that one completion gives; none where there is no completion, or it ran out of tokens."""
    if chosen is None:
        return concluded(run, "", (), extract, stopped, valid=False, **details)
    return concluded(run, chosen.text, (chosen.source,), extract, stopped, valid=chosen.finish == "stop", **details)


def concluded(
    run: Run, text: str, calls: Sequence[str], extract: Extract, stopped: str, *, valid: bool, **details: Any
) -> Answer:
    """The answer found in a text that some calls wrote together; none in a text that is not whole."""
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
    """Votes and the completions they come from.

    Attributes:
        total: votes there will be at most.
        extract: finds a vote in a text.
        seen: vote and completion by number.
    """

    total: int
    extract: Extract
    ballot: Ballot = field(init=False)
    missing: set[int] = field(init=False)
    seen: dict[int, tuple[str | None, Completion]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ballot, self.missing = Ballot(self.total), set(range(self.total))

    def count(self, number: int, completion: Completion, weight: float = 1.0) -> str | None:
        """Counts a completion's vote; returns it."""
        vote = vote_of(completion, self.extract)
        self.seen[number] = (vote, completion)
        self.ballot.add(number, vote, weight)
        self.missing.discard(number)
        return vote

    def decided(self, most: float = 1.0) -> bool:
        """Whether votes are missing and none of them, of weight `most`, can change the winner."""
        return bool(self.missing) and self.ballot.decided(self.missing, most)

    def answer(self, run: Run, stopped: str, **details: Any) -> Answer:
        """The leader, with the text of the first sample that named it."""
        leader = self.ballot.leader
        named = [self.seen[n][1] for n in sorted(self.seen) if leader is not None and self.seen[n][0] == leader]
        found: dict[str, Any] = {
            "shares": dict(self.ballot.shares()),
            "votes": self.ballot.counted,
            "spoilt": self.ballot.spoilt,
            "hint": voting_hint(self.ballot),
        }
        return answered(run, named[0] if named else None, self.extract, stopped, **found, **details)
