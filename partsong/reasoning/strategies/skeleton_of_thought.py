"""Skeleton of thought plans the points of an answer first, then writes all of them out at the same time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import answer_in, answer_of, together
from partsong.reasoning.strategies.prompts import Prompts, ask, listed

__all__ = ["SkeletonPrompts", "skeleton_of_thought"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SkeletonPrompts(Prompts):
    """Holds what `skeleton_of_thought` says: ask for the points, and ask to write a point out."""

    skeleton: str = (
        "Plan the answer to the question below as a numbered list of {fewest} to {most} points. A point is a heading "
        "of three to five words; write no sentences and nothing besides the list.\n\nQuestion:\n{question}"
    )
    expand: str = (
        "A question and the plan of its answer follow. Write the text of point {number} alone, in one or two short "
        "sentences, without its heading and without the other points.\n\nQuestion:\n{question}\n\nPlan:\n{skeleton}"
        "\n\nPoint {number}: {point}"
    )


_PROMPTS = SkeletonPrompts()


@checked
async def skeleton_of_thought(
    run: Run,
    question: str,
    *,
    extract: Extract,
    fewest: Count = 3,
    most: Count = 10,
    point_tokens: Count = 256,
    prompts: SkeletonPrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Asks for the points of an answer, writes each out in a call of its own, and joins them in order.

    It is for answers that are lists of independent points, such as advice and explanations. Where a point needs the one
    before it, as in a calculation, it makes answers worse.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in the whole text.
        fewest: fewest points to request.
        most: most points written out; further ones are left out.
        point_tokens: most tokens of the skeleton and of each point.
        prompts: its prompts.
        parameters: how texts are drawn; `point_tokens` replaces their `max_tokens`.

    Returns:
        The answer: headings and texts. A point beyond the budget has only its heading. ``details`` hold the
        headings as ``points``, and ``cut``, the numbers of the points that ran out of tokens.

    Raises:
        ArgumentError: a knob is out of range.

    Source: Skeleton-of-Thought, arXiv 2307.15337.
    """
    settings = replace(parameters or Parameters(), max_tokens=point_tokens)
    chat = ask(prompts.skeleton, question=question, fewest=str(fewest), most=str(most))
    (skeleton,) = await together([run.call(chat, path=("skeleton",), parameters=settings)])
    if skeleton is None:
        return answer_of(run, None, extract, "budget", points=[], cut=[])
    points = listed(skeleton.text)[:most]
    chats = [
        ask(prompts.expand, question=question, skeleton=skeleton.piece, number=str(i + 1), point=point)
        for i, point in enumerate(points)
    ]
    results = await together(
        run.call(chat, path=("point",), sample=i, parameters=settings) for i, chat in enumerate(chats)
    )
    written = [completion for completion in results if completion is not None]
    texts = ["" if completion is None else completion.text.strip() for completion in results]
    text = "\n\n".join(f"{i + 1}. {p}\n{t}".rstrip() for i, (p, t) in enumerate(zip(points, texts, strict=True)))
    cut = [i for i, completion in enumerate(results) if completion is not None and completion.finish != "stop"]
    calls = tuple(completion.source for completion in written) or (skeleton.source,)
    stopped = "done" if len(written) == len(points) else "budget"
    valid = stopped == "done" and not cut
    return answer_in(run, text, calls, extract, stopped, valid=valid, points=points, cut=cut)
