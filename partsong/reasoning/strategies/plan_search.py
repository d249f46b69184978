"""Plan search lists observations about a problem, combines them, and writes a solution from each combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Completion, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, Scorer, answer_of, await_score, together
from partsong.reasoning.strategies.prompts import Prompts, ask, listed
from partsong.seeds import derive

__all__ = ["PlanPrompts", "plan_search"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanPrompts(Prompts):
    """Holds what `plan_search` says, step by step."""

    observe: str = (
        "List up to {num} different observations about the problem below that could help to solve it: properties, "
        "reformulations, tricks, special cases. One per line, each beginning with a dash, without any solution."
        "\n\nProblem:\n{question}"
    )
    derive: str = (
        "Below are a problem and some observations about it. List up to {num} new observations that follow from these "
        "or combine them. One per line, each beginning with a dash, without any solution.\n\nProblem:\n{question}"
        "\n\nObservations:\n{observations}"
    )
    plan: str = (
        "Below are a problem and observations about it. Use them for a plan of a solution, in plain words, step by "
        "step and without code.\n\nProblem:\n{question}\n\nObservations:\n{observations}\n{derived}"
    )
    criticise: str = (
        "The plan below for solving a problem is said to be wrong. Say where it fails, and write a plan that does "
        "not.\n\nProblem:\n{question}\n\nPlan:\n{plan}"
    )
    outline: str = (
        "Write out the plan below as pseudocode or a numbered calculation.\n\nProblem:\n{question}\n\nPlan:\n{plan}"
    )
    solve: str = (
        "Solve the problem below by carrying out the outline, and end with the final answer.\n\nProblem:\n{question}"
        "\n\nOutline:\n{outline}"
    )


_PROMPTS = PlanPrompts()


@checked
async def plan_search(
    run: Run,
    question: str,
    *,
    extract: Extract,
    observations: Count = 4,
    combine: Count = 2,
    num: Count = 8,
    critique: bool = True,
    scorer: Scorer | None = None,
    prompts: PlanPrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Searches among plans instead of solutions: what differs between samples is the idea, not the wording.

    One call lists observations. Each subset of 1 to `combine` of them leads to further observations, a plan, an outline
    and a solution. With `critique` it also leads to a second plan that mends the first, with an outline and a solution
    of its own. At most `num` subsets are used, and their chains do not wait for each other.

    Args:
        run: makes the calls.
        question: the problem.
        extract: finds the answer in a solution.
        observations: how many observations are requested at a time, and the most used.
        combine: most observations of a subset.
        num: most subsets used; if there are more, the seed draws this many.
        critique: whether each plan is also mended.
        scorer: scores a solution, higher is better, such as by the tests it passes. None lets the solutions vote.
        prompts: its prompts.
        parameters: how texts are drawn.

    Returns:
        The answer. ``details`` hold what those of `self_consistency` hold, the ``observations``, and ``plans``, the
        number of chains that ended.

    Raises:
        ArgumentError: a knob is out of range.

    Source: PlanSearch, arXiv 2409.03733.
    """
    chains = _Chains(run, question, str(observations), prompts, parameters)
    chat = ask(prompts.observe, question=question, num=str(observations))
    (first,) = await together([run.call(chat, path=("observe",), parameters=parameters)])
    if first is None:
        return answer_of(run, None, extract, "budget", observations=[], plans=0)
    seen = [Piece(text, first.source) for text in listed(first.text)[:observations]]
    sizes = range(1, min(combine, len(seen)) + 1)
    subsets = [subset for size in sizes for subset in itertools.combinations(seen, size)]
    if len(subsets) > num:
        drawn = random.Random(derive(run.seed, "plans")).sample(range(len(subsets)), num)
        subsets = [subsets[i] for i in sorted(drawn)]
    results = await together(chains.follow(i, subset, critique) for i, subset in enumerate(subsets))
    solutions = [solution for result in results if result is not None for solution in result]
    poll = Poll(len(subsets) * (1 + critique), extract)
    for number, solution in enumerate(solutions):
        poll.count(number, solution)
    stopped = "done" if len(solutions) == poll.total else "budget"
    details = {"observations": [piece.text for piece in seen], "plans": len(solutions)}
    valid = [solution for solution in solutions if vote_of(solution, extract) is not None]
    if scorer is None or not valid:
        return poll.answer(run, stopped, **details)
    scores = [await await_score(scorer(solution)) for solution in valid]
    best = max(range(len(valid)), key=lambda i: (scores[i], -i))
    return answer_of(run, valid[best], extract, stopped, scores=scores, **details)


@dataclass(frozen=True, slots=True)
class _Chains:
    """Goes from a subset of observations to solutions."""

    run: Run
    question: str
    num: str
    prompts: PlanPrompts
    parameters: Parameters | None

    async def follow(self, number: int, subset: Sequence[Piece], critique: bool) -> list[Completion]:
        """Writes the solutions of one subset, as many as the budget allows."""
        prompts, lines = self.prompts, [piece for seen in subset for piece in ("- ", seen, "\n")]
        derived = await self._ask(prompts.derive, "derive", number, num=self.num, observations=lines)
        plan = await self._ask(prompts.plan, "plan", number, observations=lines, derived=derived.piece)
        branches = [self._solve(number, plan, ""), *([self._mend(number, plan)] if critique else [])]
        return [solution for solution in await together(branches) if solution is not None]

    async def _mend(self, number: int, plan: Completion) -> Completion:
        better = await self._ask(self.prompts.criticise, "criticise", number, plan=plan.piece)
        return await self._solve(number, better, "mended ")

    async def _solve(self, number: int, plan: Completion, label: str) -> Completion:
        outline = await self._ask(self.prompts.outline, f"{label}outline", number, plan=plan.piece)
        return await self._ask(self.prompts.solve, f"{label}solve", number, outline=outline.piece)

    async def _ask(
        self, template: str, name: str, number: int, **gaps: str | Piece | Sequence[str | Piece]
    ) -> Completion:
        chat = ask(template, question=self.question, **gaps)
        return await self.run.call(chat, path=(name,), sample=number, parameters=self.parameters)
