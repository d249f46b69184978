"""Parallel-Distill-Refine: rounds of parallel drafts, each read from a bounded workspace distilled from the last."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from partsong.errors import ArgumentError
from partsong.reasoning.answer import Answer, Extract, vote_of
from partsong.reasoning.budget import BudgetError
from partsong.reasoning.call import Completion, Message, Parameters, Piece
from partsong.reasoning.run import Run
from partsong.seeds import derive

__all__ = ["Distillation", "pdr"]

#: How drafts become the next round's workspace.
Distillation = Literal["summary", "shared-top-k", "per-sample-top-k", "random-k"]

_FIRST = "Solve the following problem. Show your work in short, and end with the final answer.\n\nProblem:\n"
_AGAIN = (
    "Solve the following problem. Below it stands a workspace from earlier attempts at it. They may be wrong, in part "
    "or altogether: check what you use, and if none of it holds, start afresh. End with the final answer.\n\nProblem:\n"
)
_DISTIL = (
    "Below are a problem and several independent attempts at it. Write a short workspace for somebody who will solve "
    "it next: results the attempts agree on, points where they contradict each other and who seems right, steps that "
    "are worth keeping, and what is still open. Do not solve the problem anew.\n\nProblem:\n"
)


async def pdr(
    run: Run,
    question: str,
    *,
    extract: Extract,
    schedule: Sequence[int] = (8, 4, 1),
    distillation: Distillation = "summary",
    keep: int = 2,
    workspace_tokens: int = 512,
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
        workspace_tokens: most tokens of a summary.
        parameters: of the drafts.

    Returns:
        The answer; ``details["rounds"]``: the answers of each round's drafts.

    Raises:
        ArgumentError: a schedule that does not end with 1, an unknown distillation, or a number below 1.

    Source: Rethinking Thinking Tokens, arXiv 2510.01123.
    """
    _check(schedule, distillation, keep, workspace_tokens)
    plan = _Plan(run, question, extract, distillation, keep, workspace_tokens, parameters)
    drafts: list[Completion] = []
    rounds: list[list[str | None]] = []
    stopped = "done"
    for number, width in enumerate(schedule):
        try:
            drafts = await plan.drafts(number, width, drafts)
        except BudgetError:
            stopped = "budget"
            break
        rounds.append([vote_of(draft, extract) for draft in drafts])
    best = _ranked(drafts, extract)[:1]
    accepted = tuple(draft.source for draft in best)
    return Answer(
        answer=vote_of(best[0], extract) if best else None,
        text=best[0].text if best else "",
        calls=accepted,
        stopped=stopped,
        summary=run.summary(accepted),
        details={"rounds": rounds},
    )


def _check(schedule: Sequence[int], distillation: str, keep: int, workspace_tokens: int) -> None:
    if (
        not schedule
        or any(isinstance(m, bool) or not isinstance(m, int) or m < 1 for m in schedule)
        or schedule[-1] != 1
    ):
        raise ArgumentError(f"schedule={tuple(schedule)!r}; use positive integers that end with 1, such as (8, 4, 1)")
    if distillation not in get_args(Distillation):
        raise ArgumentError(f"distillation={distillation!r}; use {', '.join(get_args(Distillation))}")
    for name, value in (("keep", keep), ("workspace_tokens", workspace_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}={value!r}; use a positive integer")


def _ranked(drafts: Sequence[Completion], extract: Extract) -> list[Completion]:
    """Drafts by how many others share their answer; those without an answer last, ties in order."""
    votes = [vote_of(draft, extract) for draft in drafts]
    support = [0 if vote is None else votes.count(vote) for vote in votes]
    order = sorted(range(len(drafts)), key=lambda i: (-support[i], i))
    return [drafts[i] for i in order]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What all rounds share."""

    run: Run
    question: str
    extract: Extract
    distillation: Distillation
    keep: int
    workspace_tokens: int
    parameters: Parameters | None

    async def drafts(self, number: int, width: int, before: Sequence[Completion]) -> list[Completion]:
        """A round: distils, and drafts in parallel."""
        prompts = await self._prompts(number, width, before)
        # All drafts of the last round had to end, also those that a prompt does not quote.
        waits, branch = tuple(draft.source for draft in before), (f"round {number}", "draft")
        calls = [
            self.run.call(prompt, path=branch, sample=i, parameters=self.parameters, waits=waits)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    async def _prompts(self, number: int, width: int, before: Sequence[Completion]) -> list[list[Message]]:
        if not before:
            return [[Message("user", (_FIRST, self.question))]] * width
        if self.distillation == "summary":
            chat = [Message("user", (_DISTIL, self.question, *_attempts(before)))]
            limits = Parameters(max_tokens=self.workspace_tokens, temperature=0.0)
            workspace = await self.run.call(chat, path=(f"round {number}", "distil"), parameters=limits)
            return [[Message("user", (_AGAIN, self.question, "\n\nWorkspace:\n", workspace.piece))]] * width
        chosen = [self._chosen(number, i, before) for i in range(width)]
        return [[Message("user", (_AGAIN, self.question, "\n\nWorkspace:", *_attempts(kept)))] for kept in chosen]

    def _chosen(self, number: int, sample: int, before: Sequence[Completion]) -> list[Completion]:
        """The drafts that one draft of the next round reads."""
        if self.distillation == "random-k":
            draw = random.Random(derive(self.run.seed, "random-k", number, sample))
            return draw.sample(list(before), min(self.keep, len(before)))
        best, *rest = _ranked(before, self.extract)
        more = min(self.keep - 1, len(rest))
        # Per sample, the best one for all and the next best dealt out in turn, so that no two read quite the same.
        first = sample * more if self.distillation == "per-sample-top-k" else 0
        return [best, *(rest[(first + j) % len(rest)] for j in range(more))]


def _attempts(drafts: Sequence[Completion]) -> list[str | Piece]:
    pieces: list[str | Piece] = []
    for place, draft in enumerate(drafts):
        pieces += [f"\n\nAttempt {place + 1}:\n", draft.piece]
    return pieces
