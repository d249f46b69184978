"""A run: makes calls, notes them in a graph, keeps to a budget, and remembers what is complete."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from partsong.errors import ArgumentError
from partsong.reasoning.budget import Budget, BudgetError, Price
from partsong.reasoning.call import Completion, Message, Parameters, Request, Usage
from partsong.reasoning.engine import Engine
from partsong.reasoning.graph import CallGraph, Node
from partsong.reasoning.journal import Journal
from partsong.seeds import check_seed, derive

__all__ = ["Run"]


class Run:
    """Calls of one question, however many and however deep.

    Calls are made concurrently; what they return depends on (prompt, parameters, path, sample, seed) alone, so order
    and concurrency change nothing, and sample 3 of 8 is sample 3 of 64.

    Args:
        engine: answers.
        seed: of all random streams.
        name: tells the runs of a journal apart.
        journal: where completed calls are kept; None keeps none.
        budget: what may be spent; None is no limit.
        concurrency: most calls under way.

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
    ) -> None:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise ArgumentError(f"concurrency={concurrency!r}; use a positive integer")
        self.engine, self.seed, self.journal = engine, check_seed(seed), journal
        self.budget = budget or Budget()
        self.budget.validate()
        self.name = f"{engine.name}/{name}"
        self.graph = CallGraph()
        self._gate = asyncio.Semaphore(concurrency)
        self._begin = time.monotonic()
        self._progress: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._made = 0
        self._exceeded: str | None = None
        self._left = [] if journal is None else journal.places(self.name)
        self._next = max(self._left, default=-1) + 1
        self._turn = asyncio.Condition()

    # --- calls --------------------------------------------------------------------------------------------------------

    async def call(
        self,
        messages: Sequence[Message],
        *,
        path: Sequence[str],
        sample: int = 0,
        parameters: Parameters | None = None,
        waits: Sequence[str] = (),
    ) -> Completion:
        """Makes one call, or takes it from the journal.

        Args:
            messages: the chat; pieces of earlier answers in it become the call's dependencies.
            path: the branch; with `sample` it names the call, once in a run.
            sample: which of several samples of the branch.
            parameters: of the draw.
            waits: calls that had to end before this one could begin, though it does not read them.

        Returns:
            The completion; its `source` is the call's name.

        Raises:
            BudgetError: the budget is spent; the call was not begun, or has been cancelled.
            EngineError: the engine gave no answer.
            ArgumentError: a call of that name was made, or it is missing in a replay.
        """
        labels = tuple(map(str, path))
        request = Request(
            messages=tuple(messages),
            parameters=parameters or Parameters(),
            path=labels,
            sample=sample,
            seed=derive(self.seed, "call", *labels, sample),
        )
        name = f"{'/'.join(labels)}#{sample}"
        node = self.graph.add(Node(name=name, request=request, reads=request.sources, waits=tuple(waits)))
        node.start = self._now()
        try:
            completion = await self._answer(node)
        except asyncio.CancelledError:
            self._cancelled(node)
            raise
        finally:
            node.end = self._now()
            self._progress.pop(name, None)
        return completion

    async def _answer(self, node: Node) -> Completion:
        found = None if self.journal is None else self.journal.find(self.name, node.request)
        if found is not None:
            return await self._replayed(node, *found)
        if self.journal is not None and self.journal.replay:
            await self._missing(node)
        async with self._gate:
            self._check()
            self._made += 1
            task = asyncio.ensure_future(self.engine.generate(node.request, self._watch(node.name)))
            self._tasks.add(task)
            try:
                made = await self._within_time(task)
            except asyncio.CancelledError:
                task.cancel()
                # The engine ends its side before this call counts as ended.
                await asyncio.gather(task, return_exceptions=True)
                if self._exceeded is not None:
                    self._cancelled(node)
                    raise BudgetError(f"the budget is spent: {self._exceeded}") from None
                raise
            finally:
                self._tasks.discard(task)
        return self._complete(node, made)

    def _complete(self, node: Node, made: Completion) -> Completion:
        """Keeps a completion; nobody has seen it before it is durable."""
        node.completion = _named(made, node.name)
        if self.journal is not None:
            self.journal.write(self.name, node.request, self._next, node.completion)
        self._next += 1
        return node.completion

    def _cancelled(self, node: Node) -> None:
        if node.completion is not None:
            return
        kept = None if self.journal is None else self.journal.find_cancelled(self.name, node.request)
        if kept is not None and self.journal is not None and self.journal.replay:
            node.completion = kept
            return
        usage = Usage(completion=self._progress.get(node.name, 0), reported=False)
        node.completion = Completion(text="", finish="cancelled", usage=usage, source=node.name)
        if self.journal is not None:
            self.journal.write(self.name, node.request, self._next, node.completion)

    # --- what the journal held ----------------------------------------------------------------------------------------

    async def _replayed(self, node: Node, place: int, completion: Completion) -> Completion:
        """Hands a kept completion out when its turn has come: calls end in the order in which they did."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._left or self._left[0] >= place)
            if self._left and self._left[0] == place:
                self._left.pop(0)
            node.completion, node.replayed = _named(completion, node.name), True
            self._turn.notify_all()
        return node.completion

    async def _missing(self, node: Node) -> None:
        """In a replay: waits to be cancelled, as the call was; one that nobody cancels is an error."""
        assert self.journal is not None
        if self.journal.find_cancelled(self.name, node.request) is None:
            raise ArgumentError(
                f"{self.journal.path} does not hold call {node.name} of run {self.name}, so it cannot be replayed"
            )
        await asyncio.Event().wait()

    # --- budget -------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._begin

    def _check(self) -> None:
        spent = self._exceeded or self.budget.spent(
            tokens=self.tokens, calls=self._made, seconds=self._now(), money=self.money
        )
        if spent is not None:
            self._exceeded = spent
            raise BudgetError(f"the budget is spent: {spent}")

    async def _within_time(self, task: asyncio.Task[Completion]) -> Completion:
        limit = self.budget.seconds
        try:
            return await asyncio.wait_for(
                asyncio.shield(task), None if limit is None else max(limit - self._now(), 0.0)
            )
        except TimeoutError:
            self._exceeded = f"{self._now():.6g} of {limit:.6g} seconds"
            task.cancel()
            raise asyncio.CancelledError from None

    def _watch(self, name: str) -> Any:
        def progressed(text: str, tokens: int) -> None:
            self._progress[name] = tokens
            if self._exceeded is None and (self.budget.tokens is not None or self.budget.money is not None):
                spent = self.budget.spent(tokens=self.tokens, calls=0, seconds=0.0, money=self.money)
                if spent is not None:
                    self._exceeded = spent
                    for task in self._tasks:
                        task.cancel()

        return progressed

    @property
    def tokens(self) -> int:
        """Written by all calls so far, those under way included; a journal's do not count again."""
        done = sum(node.tokens for node in self.graph.nodes.values() if not node.replayed)
        return done + sum(self._progress.values())

    @property
    def money(self) -> float:
        """Spent so far, at the budget's price."""
        price = self.budget.price or Price()
        done = [n.completion.usage for n in self.graph.nodes.values() if n.completion is not None and not n.replayed]
        under_way = sum(self._progress.values()) * price.completion
        paid = sum(
            (u.prompt - u.cached) * price.prompt + u.cached * price.cached + u.completion * price.completion
            for u in done
        )
        return (paid + under_way) / 1e6

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
    ) -> AsyncIterator[AsyncGenerator[tuple[int, Completion], None]]:
        """Several samples of one prompt, as they end; leaving the block cancels those that have not.

        Args:
            messages: the prompt.
            num: how many samples.
            path: the branch.
            parameters: of the draws.
            waits: as in `call`.

        Yields:
            An iterator over (number, completion) in the order of ending. It stops early where the budget ends.
        """
        names = [
            asyncio.ensure_future(
                self.call(messages, path=path, sample=number, parameters=parameters, waits=waits), loop=None
            )
            for number in range(num)
        ]
        try:
            yield self._as_they_end(names)
        finally:
            for task in names:
                task.cancel()
            await asyncio.gather(*names, return_exceptions=True)

    async def _as_they_end(self, tasks: list[asyncio.Task[Completion]]) -> AsyncGenerator[tuple[int, Completion], None]:
        ended: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()
        for task in tasks:
            task.add_done_callback(ended.put_nowait)
        for _ in tasks:
            task = await ended.get()
            with contextlib.suppress(BudgetError):
                yield tasks.index(task), task.result()

    def summary(self, accepted: Collection[str]) -> dict[str, Any]:
        """What the run cost, `CallGraph.summary` and ``seconds``; every call that ended counts as awaited."""
        awaited = [n.name for n in self.graph.nodes.values() if n.completion is not None and not n.waste]
        return {**self.graph.summary(accepted, awaited), "seconds": self._now(), "stopped": self._exceeded}


def _named(completion: Completion, name: str) -> Completion:
    from dataclasses import replace

    return completion if completion.source == name else replace(completion, source=name)
