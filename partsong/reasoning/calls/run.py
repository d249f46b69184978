"""A run: makes calls, notes them in a graph, keeps to a budget, and remembers what is complete."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, NoReturn

from partsong.errors import ArgumentError
from partsong.ledger import active
from partsong.reasoning.calls.budget import Budget, BudgetError, Spending
from partsong.reasoning.calls.call import Completion, Message, Parameters, Request, Usage
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.graph import CallGraph, CallNode
from partsong.reasoning.calls.journal import Entry, Journal, Past, State
from partsong.reasoning.calls.running_call import Partial, UnderWay
from partsong.reasoning.calls.turns import Turns
from partsong.seeds import check_seed, derive

__all__ = ["Observer", "Run"]

#: Told of every call, with the text that is new: when it begins, while it runs, and when it has ended.
Observer = Callable[[CallNode, str], None]


class Run:
    """Calls of one question, however many and however deep.

    Calls are made concurrently; what they return depends on (prompt, parameters, path, sample, seed) alone, so order
    and concurrency change nothing, and sample 3 of 8 is sample 3 of 64.

    Args:
        engine: answers.
        seed: of all random streams.
        name: tells the runs of a journal apart.
        journal: where completed calls are kept; None keeps none.
        budget: what may be spent, by all parts of a run that was resumed; None is no limit.
        concurrency: most calls under way.
        observer: told of every call, such as to draw it.

    Attributes:
        graph: the calls.

    Raises:
        ArgumentError: a limit that is none.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        name: str = "run",
        journal: Journal | None = None,
        budget: Budget | None = None,
        concurrency: int = 64,
        observer: Observer | None = None,
    ) -> None:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ArgumentError(f"concurrency={concurrency!r}; use a positive integer")
        self.engine, self.seed, self.journal, self.observer = engine, check_seed(seed), journal, observer
        self.name = f"{engine.name}/{name}"
        self.graph = CallGraph()
        past = Past() if journal is None else journal.past(self.name)
        self.spending = Spending(budget or Budget(), past.usage, past.seconds)
        self._places, self._turns = itertools.count(past.next), Turns(past.places)
        self._gate = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._path: tuple[str, ...] = ()
        self._waits: tuple[str, ...] = ()

    def branch(self, label: str, waits: Sequence[str] = ()) -> Run:
        """The same run for a strategy inside another one.

        Args:
            label: put before the path of each of its calls.
            waits: calls that had to end before any of its calls could begin.
        """
        inner = copy.copy(self)
        inner._path, inner._waits = (*self._path, label), (*self._waits, *waits)
        return inner

    # --- calls --------------------------------------------------------------------------------------------------------

    async def call(
        self,
        messages: Sequence[Message],
        *,
        path: Sequence[str],
        sample: int = 0,
        parameters: Parameters | None = None,
        waits: Sequence[str] = (),
        halt: Callable[[Partial], bool] | None = None,
    ) -> Completion:
        """Makes one call, or takes it from the journal.

        Args:
            messages: the chat; pieces of earlier answers in it become the call's dependencies.
            path: the branch; with `sample` it names the call, once in a run.
            sample: which of several samples of the branch.
            parameters: of the draw.
            waits: calls that had to end before this one could begin, though it does not read them.
            halt: asked at every report of the engine whether enough was read; the call then ends as "halted". It must
                judge by what it is shown alone, or by calls that ended before.

        Returns:
            The completion; its `source` is the call's name.

        Raises:
            BudgetError: the budget is spent; the call was not begun, or has been cancelled.
            EngineError: the engine gave no answer.
            ArgumentError: a call of that name was made, or it is missing in a replay.
        """
        labels = (*self._path, *map(str, path))
        request = Request(
            messages=tuple(messages),
            parameters=parameters or Parameters(),
            path=labels,
            sample=sample,
            seed=derive(self.seed, "call", *labels, sample),
        )
        name = f"{'/'.join(labels)}#{sample}"
        waits = tuple(dict.fromkeys((*self._waits, *waits)))
        node = self.graph.add(CallNode(name=name, request=request, reads=request.sources, waits=waits))
        node.start = self.spending.seconds
        self._tell(node, "")
        try:
            found = None if self.journal is None else self.journal.find(self.name, request)
            replay = self.journal if self.journal is not None and self.journal.replay else None
            if found is not None and (replay is not None or found.state == "complete"):
                return await self._replayed(node, found)
            if replay is not None:
                raise ArgumentError(
                    f"{replay.path} does not hold call {name} of run {self.name}, so it cannot be replayed"
                )
            return await self._made(node, halt)
        finally:
            if node.end is None:  # it failed
                node.end = self.spending.seconds
            self._tell(node, "")

    async def _made(self, node: CallNode, halt: Callable[[Partial], bool] | None) -> Completion:
        """A call of the engine."""
        try:
            async with self._gate:
                if self.spending.check(before_a_call=True) is not None:
                    await self._over_budget(node)
                self.spending.calls += 1
                return await self._end(node, "complete", await self._asked(UnderWay(node, self.progress, halt)))
        except asyncio.CancelledError:
            if node.completion is None:  # else it is complete, and was cancelled while it was written down
                await self._end(node, "cancelled", _cut(node))
            raise

    async def _asked(self, call: UnderWay) -> Completion:
        """What the engine says, unless it is halted or the budget ends first."""
        node = call.node
        call.task = task = asyncio.ensure_future(self.engine.generate(node.request, call))
        self._tasks.add(task)
        try:
            return await self._within_time(task)
        except asyncio.CancelledError:
            task.cancel()
            # The engine ends its side before this call counts as ended.
            await asyncio.gather(task, return_exceptions=True)
            if call.halted:
                return call.seen.as_completion()
            if self.spending.exceeded is not None:
                await self._over_budget(node)
            raise
        finally:
            self._tasks.discard(task)

    async def _within_time(self, task: asyncio.Task[Completion]) -> Completion:
        limit = self.spending.budget.seconds
        left = None if limit is None else max(limit - self.spending.seconds, 0.0)
        try:
            return await asyncio.wait_for(asyncio.shield(task), left)
        except TimeoutError:
            self.spending.out_of_time()
            raise asyncio.CancelledError from None

    async def _over_budget(self, node: CallNode) -> NoReturn:
        reason = f"the budget is spent: {self.spending.exceeded}"
        await self._end(node, "budget", replace(_cut(node), text=reason))
        raise BudgetError(reason)

    async def _end(self, node: CallNode, state: State, completion: Completion) -> Completion:
        """Keeps what came of a call; nobody has seen a completion before it is durable."""
        node.completion, node.end = replace(completion, source=node.name), self.spending.seconds
        self.spending.done(node.name, completion.usage)
        if (ledger := active()) is not None:
            ledger.count(tokens=completion.usage.completion, seconds_compute=node.end - node.start)
            ledger.step(call=node.name, finish=completion.finish, **asdict(completion.usage))
        if self.journal is not None:
            entry = Entry(next(self._places), state, node.start, node.end, node.completion)
            await self.journal.write(self.name, node.request, entry)
        return node.completion

    async def _replayed(self, node: CallNode, kept: Entry) -> Completion:
        """Hands out what is kept when its turn has come: calls end in the order in which they did."""
        try:
            if kept.state == "cancelled":
                await asyncio.Event().wait()  # until it is cancelled, as it was
            await self._turns.wait(kept.place, idle=lambda: not self._tasks)
        finally:
            node.completion, node.replayed = kept.completion, True
            node.start, node.end = kept.start, kept.end
        if kept.state == "budget":
            self.spending.exceeded = kept.completion.text.removeprefix("the budget is spent: ")
            raise BudgetError(kept.completion.text)
        return kept.completion

    def _tell(self, node: CallNode, text: str) -> None:
        if self.observer is not None:
            self.observer(node, text)

    def progress(self, node: CallNode, text: str, tokens: int) -> None:
        """Notes how far a call is; ends all calls when that uses up the budget."""
        node.written = tokens
        self._tell(node, text)
        if self.spending.progress(node.name, tokens):
            for task in self._tasks:
                task.cancel()

    # --- many calls ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def samples(
        self,
        messages: Sequence[Message],
        num: int,
        *,
        path: Sequence[str],
        parameters: Parameters | None = None,
        waits: Sequence[str] = (),
        halt: Callable[[Partial], bool] | None = None,
    ) -> AsyncIterator[AsyncGenerator[tuple[int, Completion], None]]:
        """Several samples of one prompt, as they end; leaving the block cancels those that have not.

        Args:
            messages: the prompt.
            num: how many samples.
            path: the branch.
            parameters: of the draws.
            waits: as in `call`.
            halt: likewise.

        Yields:
            An iterator over (number, completion) in the order of ending. It stops early where the budget ends.
        """
        tasks = [
            asyncio.ensure_future(
                self.call(messages, path=path, sample=number, parameters=parameters, waits=waits, halt=halt)
            )
            for number in range(num)
        ]
        try:
            yield self._as_they_end(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _as_they_end(self, tasks: list[asyncio.Task[Completion]]) -> AsyncGenerator[tuple[int, Completion], None]:
        ended: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()
        numbers = {task: number for number, task in enumerate(tasks)}
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        for _ in tasks:
            task = await ended.get()
            with contextlib.suppress(BudgetError):
                yield numbers[task], task.result()

    @property
    def replayed(self) -> int:
        """Calls that came out of the journal."""
        return sum(node.replayed for node in self.graph.nodes.values())

    def summary(self, accepted: Collection[str]) -> dict[str, Any]:
        """What the run cost: `CallGraph.summary`; ``money``, None without a price; ``stopped``, what was used up.

        ``stopped`` is None where there was enough of everything. Every call that ended by itself counts as awaited.
        """
        ended = [n for n in self.graph.nodes.values() if n.completion is not None]
        awaited = [n.name for n in ended if n.completion is not None and n.completion.finish != "cancelled"]
        money = None if self.spending.budget.price is None else self.spending.money
        return {**self.graph.summary(accepted, awaited), "money": money, "stopped": self.spending.exceeded}


def _cut(node: CallNode) -> Completion:
    """What is left of a call that did not end by itself."""
    return Completion(text="", finish="cancelled", usage=Usage(completion=node.written, reported=False))
