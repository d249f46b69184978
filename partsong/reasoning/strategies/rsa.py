"""Recursive self-aggregation rewrites a population of solutions, each from a random few of the last generation."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from partsong.errors import ArgumentError
from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.tasks import as_they_end, cancel_all
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, together
from partsong.reasoning.strategies.prompts import FIRST, Prompts, ask, numbered
from partsong.seeds import derive

__all__ = ["RsaPrompts", "rsa"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RsaPrompts(Prompts):
    """Holds the prompts of `rsa`: for a first solution, for one made from several, and to show one of these."""

    first: str = FIRST
    combine: str = (
        "Below are a problem and some solutions to it, of which any may be wrong. Take from each what you can verify, "
        "weigh them where they differ, and write one better solution; if all of them fail, find a way of your own. "
        "End with the final answer.\n\nProblem:\n{question}{candidates}"
    )
    candidate: str = "\n\nSolution {number}:\n{text}"


_PROMPTS = RsaPrompts()


@checked
async def rsa(
    run: Run,
    question: str,
    *,
    extract: Extract,
    population: Count = 16,
    aggregate: Count = 4,
    generations: Count = 10,
    early_stop: bool = True,
    prompts: RsaPrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Draws a population, rewrites it `generations` - 1 times, and lets the last one vote.

    Each solution of a generation is written from `aggregate` random ones of the generation before. The seed decides
    which, so a solution begins as soon as those it reads have ended: no generation waits for its slowest member.

    Args:
        run: makes the calls.
        question: the problem.
        extract: finds the answer in a text.
        population: N, the solutions of a generation.
        aggregate: K, the solutions each new one reads; 1 refines them one by one.
        generations: T, the number of generations with the first.
        early_stop: whether to cancel the rest once the last vote is decided, including solutions that only
            cancelled ones would read.
        prompts: its prompts.
        parameters: how solutions are drawn.

    Returns:
        The answer. If the budget was spent, the newest solutions in each place vote. ``details`` hold what those of
        `self_consistency` hold, and ``generations``, the number of them that every place reached.

    Raises:
        ArgumentError: a knob is out of range, or `aggregate` is larger than `population`.

    Source: Recursive Self-Aggregation, arXiv 2509.26626.
    """
    if aggregate > population:
        raise ArgumentError(f"aggregate={aggregate} of a population={population}; read no more than there are")
    plan = _Plan(run, question, prompts, parameters, population, aggregate)
    poll, tasks = Poll(population, extract), plan.tasks(generations)
    try:
        async for place, solution in as_they_end(tasks[-1]):
            if solution is not None:
                poll.count(place, solution)
            if early_stop and poll.decided():
                break
    finally:
        await cancel_all(task for row in tasks for task in row)
    reached = min(sum(place in row for row in plan.solutions) for place in range(population))
    if not poll.missing or (early_stop and poll.decided()):
        return poll.answer(run, "done" if not poll.missing else "decided", generations=reached)
    newest = Poll(population, extract)
    for place in range(population):
        written = [row[place] for row in plan.solutions if place in row]
        named = [solution for solution in written if vote_of(solution, extract) is not None]
        if written:
            newest.count(place, (named or written)[-1])
    return newest.answer(run, "budget", generations=reached)


@dataclass(slots=True)
class _Plan:
    """Makes a task for each solution, which waits for the solutions it reads."""

    run: Run
    question: str
    prompts: RsaPrompts
    parameters: Parameters | None
    population: int
    aggregate: int
    solutions: list[dict[int, Completion]] = field(default_factory=list)

    def tasks(self, generations: int) -> list[list[asyncio.Task[Completion | None]]]:
        """Returns a task for each place of each generation; its result is None where the budget is spent."""
        rows: list[list[asyncio.Task[Completion | None]]] = []
        for number in range(generations):
            self.solutions.append({})
            before = rows[-1] if rows else []
            rows.append([asyncio.ensure_future(self._solve(number, place, before)) for place in range(self.population)])
        return rows

    async def _solve(self, number: int, place: int, before: list[asyncio.Task[Completion | None]]) -> Completion | None:
        draw = random.Random(derive(self.run.seed, "rsa", number, place))
        read = [before[i] for i in draw.sample(range(len(before)), self.aggregate)] if before else []
        # Shielded: one reader that is cancelled must not take the solution from the others.
        parents = [await asyncio.shield(task) for task in read]
        kept = [parent for parent in parents if parent is not None]
        if len(kept) < len(parents):
            return None
        chat, path = self._chat(kept), (f"generation {number}",)
        (solution,) = await together([self.run.call(chat, path=path, sample=place, parameters=self.parameters)])
        if solution is not None:
            self.solutions[number][place] = solution
        return solution

    def _chat(self, kept: list[Completion]) -> list[Message]:
        if not kept:
            return ask(self.prompts.first, question=self.question)
        candidates = numbered(self.prompts.candidate, kept)
        return ask(self.prompts.combine, question=self.question, candidates=candidates)
