"""Sequential refinement writes one draft after the other, each over the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from partsong.knobs import Count, Whole
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Completion, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import answer_of, together
from partsong.reasoning.strategies.prompts import FIRST, Prompts, ask

__all__ = ["RefinementPrompts", "sequential_refinement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RefinementPrompts(Prompts):
    """Holds what `sequential_refinement` says: ask for the first draft, and for each that follows."""

    first: str = FIRST
    again: str = (
        "Below are a problem and a solution somebody wrote. Go through it step by step, mend what is wrong, and write "
        "out the whole solution anew. If it is beyond repair, solve the problem in another way. End with the final "
        "answer.\n\nProblem:\n{question}\n\nSolution:\n{draft}"
    )


_PROMPTS = RefinementPrompts()


@checked
async def sequential_refinement(
    run: Run,
    question: str,
    *,
    extract: Extract,
    rounds: Count = 4,
    stable: Annotated[int, Whole(0)] = 0,
    prompts: RefinementPrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Drafts, then rewrites the draft `rounds` - 1 times; the last draft is the answer.

    A draft that ran out of tokens is left out: the next rewrites the one before it again.

    Args:
        run: makes the calls.
        question: the problem.
        extract: finds the answer in a text.
        rounds: number of drafts.
        stable: stops when this many drafts in a row named the same answer; 0 writes all.
        prompts: its prompts.
        parameters: how drafts are drawn.

    Returns:
        The answer of the last draft that names one; ``details["rounds"]`` holds the answer of each draft.

    Raises:
        ArgumentError: a knob is out of range.

    Source: the sequential form of arXiv 2510.01123, where each round has one draft.
    """
    draft: Completion | None = None
    best: Completion | None = None
    last: tuple[str, ...] = ()
    votes: list[str | None] = []
    stopped = "done"
    for number in range(rounds):
        text = prompts.first if draft is None else prompts.again
        chat = ask(text, question=question, draft="" if draft is None else draft.piece)
        (newest,) = await together([run.call(chat, path=(f"round {number}",), parameters=parameters, waits=last)])
        if newest is None:
            stopped = "budget"
            break
        last, vote = (newest.source,), vote_of(newest, extract)
        votes.append(vote)
        draft = newest if newest.finish == "stop" else draft
        best = newest if vote is not None else best
        if stable and len(votes) >= stable and vote is not None and set(votes[-stable:]) == {vote}:
            stopped = "done" if number == rounds - 1 else "confident"
            break
    return answer_of(run, best or draft, extract, stopped, rounds=votes)
