"""Decomposition: a question that is one template over many pieces of data becomes that many calls at once."""

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
from partsong.reasoning.strategies.parts import answered, concluded, together
from partsong.reasoning.strategies.prompts import Prompts, ask, numbered
from partsong.reasoning.strategies.single import single
from partsong.reasoning.strategies.splits import ProblemSplit, read_split

__all__ = ["DecomposePrompts", "decompose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecomposePrompts(Prompts):
    """What `decompose` says: the call that looks for parts, one part, the call that joins them, a part within it."""

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
        split: the parts, where they are known; None asks the model. A request that has no parts is answered in one
            call.
        join: whether a last call writes one answer from the parts; else they follow each other.
        most: largest number of parts.
        plan_tokens: most tokens of the call that looks for parts.
        prompts: texts of its own.
        parameters: of the parts' draws.

    Returns:
        The answer; ``details["parts"]``: how many there were, 1 for one call.

    Raises:
        ArgumentError: a knob out of range, or a split without data.

    Source: ParallelPrompt, arXiv 2506.18728.
    """
    if split is not None and not split.data:
        raise ArgumentError("the split has no data; give at least one piece, or None to ask the model")
    planned: Completion | None = None
    if split is None:
        limits = Parameters(max_tokens=plan_tokens, temperature=0.0)
        (planned,) = await together(
            [run.call(ask(prompts.split, question=question), path=("plan",), parameters=limits)]
        )
        if planned is None:
            return answered(run, None, extract, "budget", parts=0)
        split = read_split(planned.text, most)
    if split is None:
        assert planned is not None
        whole = run.branch("whole", (planned.source,))
        return replace(await single(whole, question, extract=extract, parameters=parameters), details={"parts": 1})
    context = f"{split.context}\n\n" if split.context else ""
    tasks: list[str | Piece] = [split.template.replace("[DATA]", piece) for piece in split.data]
    if planned is not None:
        tasks = [Piece(str(task), planned.source) for task in tasks]
    made = await together(
        run.call(ask(prompts.part, context=context, task=task), path=("part",), sample=i, parameters=parameters)
        for i, task in enumerate(tasks)
    )
    return await _joined(run, question, extract, made, prompts if join else None, parameters)


async def _joined(
    run: Run,
    question: str,
    extract: Extract,
    made: Sequence[Completion | None],
    prompts: DecomposePrompts | None,
    parameters: Parameters | None,
) -> Answer:
    """The parts one after the other, or, with prompts, in the words of a last call."""
    parts = [part for part in made if part is not None]
    cut = [i for i, part in enumerate(made) if part is not None and part.finish != "stop"]
    if prompts is not None and len(parts) == len(made):
        chat = ask(prompts.join, question=question, parts=numbered(prompts.item, parts))
        (last,) = await together([run.call(chat, path=("join",), parameters=parameters)])
        if last is not None:
            return answered(run, last, extract, "done", parts=len(made), cut=cut)
        stopped = "budget"
    else:
        stopped = "done" if len(parts) == len(made) else "budget"
    text = "\n\n".join("" if part is None else part.text.strip() for part in made)
    calls = [part.source for part in parts]
    return concluded(run, text, calls, extract, stopped, valid=stopped == "done" and not cut, parts=len(made), cut=cut)
