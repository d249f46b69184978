"""Decomposition turns a question that is one template over many pieces of data into one call for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from partsong.errors import ArgumentError
from partsong.knobs import Count, Whole
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Completion, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import answer_in, answer_of, together
from partsong.reasoning.strategies.prompts import Prompts, ask, numbered
from partsong.reasoning.strategies.single import single
from partsong.reasoning.strategies.splits import ProblemSplit, read_split

__all__ = ["DecomposePrompts", "decompose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecomposePrompts(Prompts):
    """Holds what `decompose` says: look for parts, answer one part, join them, show a part that is joined."""

    split: str = (
        "Does the request below ask for one and the same thing several times, on different pieces of data or simply "
        "over again, so that each could be answered without the others? Reply with one JSON object and nothing else. "
        'If so: {{"template": the request for one piece, with [DATA] where the piece goes, "context": what all of them '
        'need to know, or "", "data": [the pieces]}}, or "n": how many, in place of "data". If not: {{"serial": true}}.'
        "\n\nRequest:\n{question}"
    )
    part: str = "{context}{task}"
    join: str = (
        "A request was answered in parts. Put the parts together into one answer to the request, and leave nothing "
        "out.\n\nRequest:\n{question}{parts}"
    )
    item: str = "\n\nPart {number}:\n{text}"


_PROMPTS = DecomposePrompts()


@checked
async def decompose(
    run: Run,
    question: str,
    *,
    extract: Extract,
    split: ProblemSplit | None = None,
    join: bool = False,
    most: Annotated[int, Whole(2)] = 32,
    plan_tokens: Count = 1024,
    prompts: DecomposePrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Finds the parts of a request, answers all of them at once, and puts the answers together.

    Args:
        run: makes the calls.
        question: the request.
        extract: finds the answer in the whole text.
        split: the parts, if known; None asks the model. A request without parts is answered in one call.
        join: whether a last call writes one answer from the parts; otherwise they follow each other.
        most: largest number of parts.
        plan_tokens: most tokens of the call that looks for parts.
        prompts: its prompts.
        parameters: how the parts are drawn.

    Returns:
        The answer; ``details["parts"]`` is the number of parts, 1 where the request has none.

    Raises:
        ArgumentError: a knob is out of range, or the split has no data.

    Source: ParallelPrompt, arXiv 2506.18728.
    """
    if split is not None and not split.data:
        raise ArgumentError("the split has no data; give at least one piece, or None to ask the model")
    plan: Completion | None = None
    if split is None:
        limits = Parameters(max_tokens=plan_tokens, temperature=0.0)
        (plan,) = await together([run.call(ask(prompts.split, question=question), path=("plan",), parameters=limits)])
        if plan is None:
            return answer_of(run, None, extract, "budget", parts=0)
        split = read_split(plan.text, most)
    if split is None:
        assert plan is not None
        whole = run.branch("whole", (plan.source,))
        return replace(await single(whole, question, extract=extract, parameters=parameters), details={"parts": 1})
    context = f"{split.context}\n\n" if split.context else ""
    tasks: list[str | Piece] = [split.template.replace("[DATA]", piece) for piece in split.data]
    if plan is not None:
        tasks = [Piece(str(task), plan.source) for task in tasks]
    results = await together(
        run.call(ask(prompts.part, context=context, task=task), path=("part",), sample=i, parameters=parameters)
        for i, task in enumerate(tasks)
    )
    return await _join(run, question, extract, results, prompts if join else None, parameters)


async def _join(
    run: Run,
    question: str,
    extract: Extract,
    results: Sequence[Completion | None],
    prompts: DecomposePrompts | None,
    parameters: Parameters | None,
) -> Answer:
    """Puts the parts one after the other or, with prompts, asks a last call to join them."""
    parts = [part for part in results if part is not None]
    cut = [i for i, part in enumerate(results) if part is not None and part.finish != "stop"]
    stopped = "done" if len(parts) == len(results) else "budget"
    if prompts is not None and stopped == "done":
        chat = ask(prompts.join, question=question, parts=numbered(prompts.item, parts))
        (last,) = await together([run.call(chat, path=("join",), parameters=parameters)])
        if last is not None:
            return answer_of(run, last, extract, "done", parts=len(results), cut=cut)
        stopped = "budget"
    text = "\n\n".join("" if part is None else part.text.strip() for part in results)
    calls, valid = [part.source for part in parts], stopped == "done" and not cut
    return answer_in(run, text, calls, extract, stopped, valid=valid, parts=len(results), cut=cut)
