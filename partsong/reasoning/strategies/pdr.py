"""Parallel-Distill-Refine: rounds of parallel drafts, each read from a bounded workspace distilled from the last."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.budget import BudgetError
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import Widths, checked
from partsong.reasoning.strategies.parts import answered, by_support, ends, together
from partsong.reasoning.strategies.prompts import FIRST, Prompts, ask, numbered
from partsong.seeds import derive

__all__ = ["Distillation", "PdrPrompts", "pdr"]

#: How drafts become the next round's workspace.
Distillation = Literal["summary", "shared-top-k", "per-sample-top-k", "random-k"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PdrPrompts(Prompts):
    """What `pdr` says: a first draft, a later one, the call that distils, and one attempt within either."""

    first: str = FIRST
    again: str = (
        "Solve the following problem. Below it stands a workspace from earlier attempts at it. They may be wrong, in "
        "part or altogether: check what you use, and if none of it holds, start afresh. End with the final answer."
        "\n\nProblem:\n{question}\n\nWorkspace:\n{workspace}"
    )
    distil: str = (
        "Below are a problem and several independent attempts at it. Write a short workspace for somebody who will "
        "solve it next: results the attempts agree on, points where they contradict each other and who seems right, "
        "steps that are worth keeping, and what is still open. Do not solve the problem anew.\n\nProblem:\n{question}"
        "{attempts}"
    )
    attempt: str = "\n\nAttempt {number}:\n{text}"


_PROMPTS = PdrPrompts()


@checked
async def pdr(
    run: Run,
    question: str,
    *,
    extract: Extract,
    schedule: Annotated[Sequence[int], Widths()] = (8, 4, 1),
    distillation: Distillation = "summary",
    keep: Count = 2,
    workspace_tokens: Count = 1024,
    prompts: PdrPrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Drafts in parallel, distils a bounded workspace, drafts again from it; the last round's draft is the answer.

    Args:
        run: makes the calls.
        question: the problem.
        extract: finds the answer in a text.
        schedule: drafts per round, the last of them 1.
        distillation: "summary", one call writes the workspace from all drafts; "shared-top-k", the same `keep` drafts
            for all; "per-sample-top-k", each draft of the next round gets `keep` drafts of its own choice; "random-k",
            likewise but drawn at random. The best drafts are those whose answer most others share.
        keep: k.
        workspace_tokens: most tokens of the workspace. Of drafts that would fill more, the ends are kept, where their
            answers stand.
        prompts: texts of its own.
        parameters: of the drafts.

    Returns:
        The answer; where the budget ended it or the last draft names none, the one that leads in the last round that
        is complete and names any. ``details["rounds"]``: the answers of each round's drafts.

    Raises:
        ArgumentError: a schedule that does not end with 1, an unknown distillation, or a number below 1.

    Source: Rethinking Thinking Tokens, arXiv 2510.01123.
    """
    plan = _Plan(run, question, extract, distillation, keep, workspace_tokens, prompts, parameters)
    drafts: list[Completion] = []
    rounds: list[list[str | None]] = []
    best: Completion | None = None
    stopped = "done"
    for number, width in enumerate(schedule):
        made = await plan.drafts(number, width, drafts)
        drafts = [draft for draft in made if draft is not None]
        if len(drafts) < width:
            stopped = "budget"
            break
        rounds.append([vote_of(draft, extract) for draft in drafts])
        leader = by_support(drafts, extract)[0]
        best = leader if best is None or vote_of(leader, extract) is not None else best
    return answered(run, best, extract, stopped, rounds=rounds)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all rounds share."""

    run: Run
    question: str
    extract: Extract
    distillation: Distillation
    keep: int
    workspace_tokens: int
    prompts: PdrPrompts
    parameters: Parameters | None

    async def drafts(self, number: int, width: int, before: Sequence[Completion]) -> Sequence[Completion | None]:
        """A round: distils, and drafts in parallel; None for what the budget did not allow."""
        try:
            chats = await self._chats(number, width, before)
        except BudgetError:
            return []
        # All drafts of the last round had to end, also those that a prompt does not quote.
        waits, branch = tuple(draft.source for draft in before), (f"round {number}", "draft")
        return await together(
            self.run.call(chat, path=branch, sample=i, parameters=self.parameters, waits=waits)
            for i, chat in enumerate(chats)
        )

    async def _chats(self, number: int, width: int, before: Sequence[Completion]) -> list[list[Message]]:
        if not before:
            return [ask(self.prompts.first, question=self.question)] * width
        if self.distillation == "summary":
            attempts = numbered(self.prompts.attempt, before)
            limits = Parameters(max_tokens=self.workspace_tokens, temperature=0.0)
            chat = ask(self.prompts.distil, question=self.question, attempts=attempts)
            workspace = await self.run.call(chat, path=(f"round {number}", "distil"), parameters=limits)
            return [ask(self.prompts.again, question=self.question, workspace=workspace.piece)] * width
        chosen = [ends(self._chosen(number, i, before), self.workspace_tokens) for i in range(width)]
        texts = [numbered(self.prompts.attempt, kept) for kept in chosen]
        return [ask(self.prompts.again, question=self.question, workspace=text) for text in texts]

    def _chosen(self, number: int, sample: int, before: Sequence[Completion]) -> list[Completion]:
        """The drafts that one draft of the next round reads."""
        if self.distillation == "random-k":
            draw = random.Random(derive(self.run.seed, "random-k", number, sample))
            return draw.sample(list(before), min(self.keep, len(before)))
        best, *rest = by_support(before, self.extract)
        more = min(self.keep - 1, len(rest))
        # Per sample, the best one for all and the next best dealt out in turn, so that no two read quite the same.
        first = sample * more if self.distillation == "per-sample-top-k" else 0
        return [best, *(rest[(first + j) % len(rest)] for j in range(more))]
