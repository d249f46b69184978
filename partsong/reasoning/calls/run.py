"""Runs a thinking method: makes its calls, notes them in a graph, keeps to a budget, and stores completed calls."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, NoReturn

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs, type_hints
from partsong.ledger import active
from partsong.reasoning.calls.budget import Budget, BudgetError, Spending
from partsong.reasoning.calls.call import Completion, Message, Parameters, Request, Usage
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.graph import CallGraph, CallNode
from partsong.reasoning.calls.journal import Entry, Journal, Past, State
from partsong.reasoning.calls.running_call import Halt, RunningCall
from partsong.reasoning.calls.tasks import as_they_end, cancel_all
from partsong.reasoning.calls.turns import Turns
from partsong.seeds import check_seed, derive

__all__ = ["Observer", "Run"]

#: Called with a call and its new text when the call begins, while it runs, and when it has ended.
Observer = Callable[[CallNode, str], None]


class Run:
    """Makes the calls of one question.

    Calls are made concurrently. Their results depend only on (prompt, parameters, path, sample, seed), so order and
    concurrency change nothing, and sample 3 of 8 is sample 3 of 64.

    Args:
        engine: answers the calls.
        seed: seed of all random streams.
        name: distinguishes the runs of a journal.
        journal: keeps completed calls; None keeps nothing.
        budget: what all parts of a run may spend, also those before it was resumed; None sets no limit.
        concurrency: most calls at the same time.
        observer: called with every call and its new text, for example to draw it.

    Attributes:
        graph: the calls.

    Raises:
        ArgumentError: `concurrency` or a limit of the budget is not positive.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        name: str = "run",
        journal: Journal | None = None,
        budget: Budget | None = None,
        concurrency: Count = 64,
        observer: Observer | None = None,
    ) -> None:
        check_knobs(type_hints(Run.__init__), {"concurrency": concurrency})
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
        """Returns the same run for a method inside another one.

        Args:
            label: prefix of the path of each of its calls.
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
        halt: Halt | None = None,
    ) -> Completion:
        """Makes one call, or takes it from the journal.

        Args:
            messages: the chat. The call depends on the calls whose pieces are in it.
            path: the branch. Together with `sample` it names the call, once in a run.
            sample: which of several samples of the branch.
            parameters: how the answer is drawn.
            waits: calls that had to end before this one could begin, though it does not read them.
            halt: called at every report of the engine; when it returns True, enough was read, and the call ends as
                "halted". It must decide by its arguments, or by calls that ended before.

        Returns:
            The completion; its `source` is the call's name.

        Raises:
            BudgetError: the budget is spent; the call was not begun, or has been cancelled.
            EngineError: the engine gave no answer.
            ArgumentError: there is a call of that name already, or the replayed journal does not hold it.
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
        self._report(node, "")
        try:
            kept = None if self.journal is None else self.journal.find(self.name, request)
            replay = self.journal if self.journal is not None and self.journal.replay else None
            if kept is not None and (replay is not None or kept.state == "complete"):
                return await self._replay(node, kept)
            if replay is not None:
                raise ArgumentError(
                    f"{replay.path} does not hold call {name} of run {self.name}, so it cannot be replayed"
                )
            node.cut = None if kept is None else kept.completion.usage
            return await self._make(node, halt)
        finally:
            if node.end is None:  # the call failed
                node.end = self.spending.seconds
            self._report(node, "")

    async def _make(self, node: CallNode, halt: Halt | None) -> Completion:
        """Makes a call of the engine and notes how it ended."""
        try:
            async with self._gate:
                if self.spending.check(before_a_call=True) is not None:
                    await self._over_budget(node)
                self.spending.calls += 1
                return await self._end(node, "complete", await self._ask(RunningCall(node, self.progress, halt)))
        except asyncio.CancelledError:
            if node.completion is None:  # otherwise it is complete, and was cancelled while it was being stored
                await self._end(node, "cancelled", _cut(node))
            raise

    async def _ask(self, call: RunningCall) -> Completion:
        """Returns the engine's answer, unless the call is halted or the budget ends first."""
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
                return call.partial.as_completion()
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
        """Stores the completion of a call on disk before it is returned."""
        usage = completion.usage
        self.spending.done(node.name, usage)  # an earlier attempt has been counted when the run was resumed
        if node.cut is not None:
            usage = usage.after(node.cut, is_cut=state != "complete")
        node.completion, node.end = replace(completion, source=node.name, usage=usage), self.spending.seconds
        if (ledger := active()) is not None:
            ledger.count(tokens=completion.usage.completion, seconds_compute=node.end - node.start)
            ledger.step(call=node.name, finish=completion.finish, **asdict(completion.usage))
        if self.journal is not None:
            entry = Entry(next(self._places), state, node.start, node.end, node.completion)
            await self.journal.write(self.name, node.request, entry)
        return node.completion

    async def _replay(self, node: CallNode, kept: Entry) -> Completion:
        """Returns the stored completion when its turn comes: calls end in their original order."""
        try:
            if kept.state == "cancelled":
                await asyncio.Event().wait()  # until it is cancelled again
            await self._turns.wait(kept.place, idle=lambda: not self._tasks)
        finally:
            node.completion, node.replayed = kept.completion, True
            node.start, node.end = kept.start, kept.end
        if kept.state == "budget":
            self.spending.exceeded = kept.completion.text.removeprefix("the budget is spent: ")
            raise BudgetError(kept.completion.text)
        return kept.completion

    def _report(self, node: CallNode, text: str) -> None:
        if self.observer is not None:
            self.observer(node, text)

    def progress(self, node: CallNode, text: str, tokens: int) -> None:
        """Notes the progress of a call; cancels all calls when that uses up the budget."""
        node.written = tokens
        self._report(node, text)
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
        halt: Halt | None = None,
    ) -> AsyncIterator[AsyncGenerator[tuple[int, Completion], None]]:
        """Draws several samples of one prompt; leaving the block cancels those that have not ended.

        Args:
            messages: the prompt.
            num: number of samples.
            path: the branch.
            parameters: how samples are drawn.
            halt: see `call`.

        Yields:
            An iterator over (number, completion) in the order of ending. It stops early when the budget is spent.
        """
        tasks = [
            asyncio.ensure_future(self.call(messages, path=path, sample=number, parameters=parameters, halt=halt))
            for number in range(num)
        ]
        try:
            yield as_they_end(tasks)
        finally:
            await cancel_all(tasks)

    @property
    def replayed(self) -> int:
        """Counts the calls that were read from the journal."""
        return sum(node.replayed for node in self.graph.nodes.values())

    def summary(self, accepted: Collection[str]) -> dict[str, Any]:
        """Sums up what the run cost.

        Returns:
            What `CallGraph.summary` returns, where every call that was not cancelled counts as awaited; ``money``, None
            without a price; and ``stopped``, the limit that was used up, None if the budget sufficed.
        """
        ended = [n for n in self.graph.nodes.values() if n.completion is not None]
        awaited = [n.name for n in ended if n.completion is not None and n.completion.finish != "cancelled"]
        money = None if self.spending.budget.price is None else self.spending.money
        return {**self.graph.summary(accepted, awaited), "money": money, "stopped": self.spending.exceeded}


def _cut(node: CallNode) -> Completion:
    """Returns the rest of a call that did not end by itself."""
    return Completion(text="", finish="cancelled", usage=Usage(completion=node.written, reported=False))
