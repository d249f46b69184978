"""Beginnings of solutions, grouped by where a judge thinks they lead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from partsong.reasoning.calls.call import Completion, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.parts import now, together
from partsong.reasoning.strategies.prompts import Prompts, ask

__all__ = ["Groups", "Judge", "PrunePrompts"]

#: Chance that two beginnings of solutions end with the same answer: of (question, one, other); may be async.
Judge = Callable[[str, str, str], float | Awaitable[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunePrompts(Prompts):
    """What `deepprune` says where the model itself is the judge."""

    judge: str = (
        "Two people have begun to solve the problem below, and neither has finished. Will they arrive at the same "
        "final answer? Reply with yes or no.\n\nProblem:\n{question}\n\nFirst:\n{one}\n\nSecond:\n{other}"
    )


@dataclass(slots=True)
class Groups:
    """Beginnings, sorted one by one into groups.

    Attributes:
        run: makes the judge's calls.
        question: the problem.
        judge: None is the model.
        threshold: mean chance above which a beginning joins a group.
        members: of a group, compared with at most.
        most: groups at most.
        prompts: texts.
        begun: completions by number.
        groups: numbers, in the order of joining.
        last: the calls that ended last.
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
        """Sorts all; returns whether the budget sufficed. What it did not suffice for stays alone."""
        self.last = tuple(completion.source for completion in self.begun.values())
        whole = True
        for number in self.begun:
            pairs = [(g, i) for g, group in enumerate(self.groups) for i in group[: self.members]]
            found = await together(self._alike(number, other) for _, other in pairs) if whole else [None] * len(pairs)
            whole = whole and None not in found
            means = self._means(pairs, found) if whole else []
            best = max(range(len(means)), key=lambda g: (means[g], -g), default=None)
            if best is not None and (means[best] > self.threshold or len(self.groups) >= self.most):
                self.groups[best].append(number)
            else:
                self.groups.append([number])
        return whole

    def _means(self, pairs: Sequence[tuple[int, int]], found: Sequence[tuple[float, str] | None]) -> list[float]:
        chances: list[list[float]] = [[] for _ in self.groups]
        for (group, _), alike in zip(pairs, found, strict=True):
            assert alike is not None
            chances[group].append(alike[0])
        self.last = tuple(alike[1] for alike in found if alike is not None and alike[1]) or self.last
        return [sum(values) / len(values) for values in chances]

    async def _alike(self, number: int, other: int) -> tuple[float, str]:
        one, two = self.begun[other], self.begun[number]
        if self.judge is not None:
            return await now(self.judge(self.question, one.text, two.text)), ""
        chat = ask(self.prompts.judge, question=self.question, one=one.piece, other=two.piece)
        limits = Parameters(max_tokens=8, temperature=0.0)
        said = await self.run.call(chat, path=("judge", f"{other} and {number}"), parameters=limits, waits=self.last)
        return float(said.text.strip().lower().startswith("yes")), said.source
