"""Parallel-Distill-Refine writes rounds of parallel drafts, each round from a workspace distilled from the last."""

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
from partsong.reasoning.strategies.parts import answer_of, by_support, draft_ends, together
from partsong.reasoning.strategies.prompts import FIRST, Prompts, ask, numbered
from partsong.seeds import derive

__all__ = ["Distillation", "PdrPrompts", "pdr"]

#: How drafts become the next round's workspace.
Distillation = Literal["summary", "shared-top-k", "per-sample-top-k", "random-k"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PdrPrompts(Prompts):
    """Holds what `pdr` says: ask for a first draft or a later one, distil, and show one attempt."""

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
    """Drafts in parallel, distils a bounded workspace, drafts again from it; the draft of the last round is the answer.

    Args:
        run: makes the calls.
        question: the problem.
        extract: finds the answer in a text.
        schedule: drafts per round; the last round has 1.
        distillation: how drafts become a workspace. With "summary" one call writes it from all drafts. With
            "shared-top-k" all drafts of the next round read the same `keep` drafts. With "per-sample-top-k" each of
            them reads `keep` drafts of its own choice, and with "random-k" `keep` drafts drawn at random. The best
            drafts are those whose answer most others share.
        keep: k, the number of drafts kept.
        workspace_tokens: most tokens of the workspace. Drafts that would fill more are cut to their ends, where their
            answers stand.
        prompts: its prompts.
        parameters: how drafts are drawn.

    Returns:
        The answer. If the budget was spent or the last draft names no answer, it is the leading answer of the last
        complete round that names any. ``details["rounds"]`` holds the answers of each round's drafts.

    Raises:
        ArgumentError: the schedule does not end with 1, the distillation is unknown, or a number is below 1.

    Source: Rethinking Thinking Tokens, arXiv 2510.01123.
    """
    plan = _Plan(run, question, extract, distillation, keep, workspace_tokens, prompts, parameters)
    drafts: list[Completion] = []
    rounds: list[list[str | None]] = []
    best: Completion | None = None
    stopped = "done"
    for number, width in enumerate(schedule):
        results = await plan.drafts(number, width, drafts)
        drafts = [draft for draft in results if draft is not None]
        if len(drafts) < width:
            stopped = "budget"
            break
        rounds.append([vote_of(draft, extract) for draft in drafts])
        leader = by_support(drafts, extract)[0]
        best = leader if best is None or vote_of(leader, extract) is not None else best
    return answer_of(run, best, extract, stopped, rounds=rounds)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Writes the rounds; its fields are what all rounds share."""

    run: Run
    question: str
    extract: Extract
    distillation: Distillation
    keep: int
    workspace_tokens: int
    prompts: PdrPrompts
    parameters: Parameters | None

    async def drafts(self, number: int, width: int, before: Sequence[Completion]) -> Sequence[Completion | None]:
        """Writes one round: distils, and drafts in parallel. Drafts beyond the budget are None."""
        try:
            chats = await self._chats(number, width, before)
        except BudgetError:
            return []
        # This round waits for all drafts of the last one, also for those that a prompt does not quote.
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
        chosen = [draft_ends(self._choose(number, i, before), self.workspace_tokens) for i in range(width)]
        texts = [numbered(self.prompts.attempt, kept) for kept in chosen]
        return [ask(self.prompts.again, question=self.question, workspace=text) for text in texts]

    def _choose(self, number: int, sample: int, before: Sequence[Completion]) -> list[Completion]:
        """Returns the drafts that one draft of the next round reads."""
        if self.distillation == "random-k":
            draw = random.Random(derive(self.run.seed, "random-k", number, sample))
            return draw.sample(list(before), min(self.keep, len(before)))
        best, *rest = by_support(before, self.extract)
        more = min(self.keep - 1, len(rest))
        # All read the best draft, and the next best are assigned in turn, so that no two read exactly the same.
        first = sample * more if self.distillation == "per-sample-top-k" else 0
        return [best, *(rest[(first + j) % len(rest)] for j in range(more))]
