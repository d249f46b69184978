"""Groups the beginnings of solutions by where a judge thinks they lead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from partsong.reasoning.calls.call import Completion, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.parts import await_score, together
from partsong.reasoning.strategies.prompts import Prompts, ask

__all__ = ["Groups", "Judge", "PrunePrompts"]

#: Takes (question, one, other) and returns the chance that two beginnings end with the same answer; may be async.
Judge = Callable[[str, str, str], float | Awaitable[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunePrompts(Prompts):
    """Holds the prompt with which `deepprune` asks the model to be the judge."""

    judge: str = (
        "Two people have begun to solve the problem below, and neither has finished. Will they arrive at the same "
        "final answer? Reply with yes or no.\n\nProblem:\n{question}\n\nFirst:\n{one}\n\nSecond:\n{other}"
    )


@dataclass(slots=True)
class Groups:
    """Sorts beginnings by number into groups, one by one; for the settings see `deepprune`.

    `groups` holds the numbers in each group in the order of joining, and `last` the calls that ended last.
    """

    run: Run
    question: str
    judge: Judge | None
    threshold: float
    members: int
    most: int
    prompts: PrunePrompts
    begun: dict[int, Completion]
    groups: list[list[int]] = field(default_factory=list)
    last: tuple[str, ...] = ()

    async def sort(self) -> bool:
        """Sorts all beginnings; returns whether the budget sufficed. Beginnings beyond it get a group of their own."""
        self.last = tuple(completion.source for completion in self.begun.values())
        affordable = True
        for number in self.begun:
            means = await self._means(number) if affordable else None
            affordable = means is not None
            ranked = sorted(enumerate(means or []), key=lambda pair: (-pair[1], pair[0]))
            if ranked and (ranked[0][1] > self.threshold or len(self.groups) >= self.most):
                self.groups[ranked[0][0]].append(number)
            else:
                self.groups.append([number])
        return affordable

    async def _means(self, number: int) -> list[float] | None:
        """Returns the mean chance for each group that a beginning belongs there; None if the budget is spent."""
        pairs = [(g, other) for g, group in enumerate(self.groups) for other in group[: self.members]]
        verdicts = await together(self._compare(number, other) for _, other in pairs)
        chances: list[list[float]] = [[] for _ in self.groups]
        for (group, _), verdict in zip(pairs, verdicts, strict=True):
            if verdict is None:
                return None
            chances[group].append(verdict[0])
        self.last = tuple(verdict[1] for verdict in verdicts if verdict is not None and verdict[1]) or self.last
        return [sum(values) / len(values) for values in chances]

    async def _compare(self, number: int, other: int) -> tuple[float, str]:
        """Returns the chance that two beginnings lead to the same answer, and the name of the judging call, or ""."""
        one, two = self.begun[other], self.begun[number]
        if self.judge is not None:
            return await await_score(self.judge(self.question, one.text, two.text)), ""
        chat = ask(self.prompts.judge, question=self.question, one=one.piece, other=two.piece)
        limits = Parameters(max_tokens=8, temperature=0.0)
        reply = await self.run.call(chat, path=("judge", f"{other} and {number}"), parameters=limits, waits=self.last)
        return float(reply.text.strip().lower().startswith("yes")), reply.source
