"""DeepPrune: samples that are heading for the same answer are told apart early, and only one of a kind is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from partsong.errors import ArgumentError
from partsong.knobs import Count, Share
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.groups import Groups, Judge, PrunePrompts
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, together

__all__ = ["deepprune"]

_PROMPTS = PrunePrompts()


@checked
async def deepprune(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: Count = 16,
    prefix_tokens: Count = 500,
    judge: Judge | None = None,
    threshold: Share = 0.5,
    members: Count = 4,
    most_clusters: Count = 32,
    keep: Count = 1,
    vote: Literal["traces", "sizes"] = "traces",
    prompts: PrunePrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Begins `num` samples, groups the beginnings by where they seem to lead, and finishes a few of each group.

    The beginnings are grouped one by one: each is compared with up to `members` of every group and joins the one whose
    mean is highest if that lies above `threshold`, else it founds a group of its own. `keep` of each group go on, by
    continuing the message they began; the others cost nothing more.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        num: samples begun.
        prefix_tokens: tokens of a beginning.
        judge: chance that two beginnings end alike, of (question, one, other); may be async. None asks the model,
            with calls that count like all others.
        threshold: mean chance above which a beginning joins a group.
        members: of a group, compared with at most; the first ones.
        most_clusters: groups at most; when there are so many, a beginning joins the best one.
        keep: samples finished per group.
        vote: "traces", each finished sample has one vote, as in the paper; "sizes", those of a group share as many
            votes as beginnings joined it, which is the vote of all samples wherever the judge is right.
        prompts: texts of its own.
        parameters: of the draws; `max_tokens` is that of a whole sample.

    Returns:
        The answer; ``details`` as of `self_consistency`, and ``clusters``, the numbers of the samples of each group.

    Raises:
        ArgumentError: a knob out of range, or a beginning as long as a whole sample.

    Source: DeepPrune, arXiv 2510.08483.
    """
    asked = parameters or Parameters()
    if prefix_tokens >= asked.max_tokens:
        raise ArgumentError(f"prefix_tokens={prefix_tokens} of max_tokens={asked.max_tokens}; begin with fewer")
    chat, begin = [Message("user", (question,))], replace(asked, max_tokens=prefix_tokens)
    made = await together(run.call(chat, path=("begin",), sample=i, parameters=begin) for i in range(num))
    begun = {i: completion for i, completion in enumerate(made) if completion is not None}
    groups = Groups(run, question, judge, threshold, members, most_clusters, prompts, begun)
    spent = len(begun) < num or not await groups.sort()
    chosen = [i for group in groups.groups for i in group[:keep]]
    limits = replace(asked, max_tokens=asked.max_tokens - prefix_tokens)
    ended = await together(_finished(run, chat, begun[i], i, groups.last, limits) for i in chosen)
    done = {i: completion for i, completion in zip(chosen, ended, strict=True) if completion is not None}
    poll = Poll(num, extract)
    for group in groups.groups:
        named = sum(vote_of(done[i], extract) is not None for i in group[:keep] if i in done)
        for i in group[:keep]:
            if i in done:
                poll.count(i, done[i], len(group) / max(1, named) if vote == "sizes" else 1.0)
    stopped = "budget" if spent or None in ended else "done"
    return poll.answer(run, stopped, clusters=[list(group) for group in groups.groups])


async def _finished(
    run: Run, chat: Sequence[Message], begun: Completion, number: int, waits: Sequence[str], limits: Parameters
) -> Completion:
    """A beginning with its rest; one that had ended is whole."""
    if begun.finish == "stop":
        return begun
    prompt = [*chat, Message("assistant", (begun.piece,))]
    rest = await run.call(prompt, path=("finish",), sample=number, parameters=limits, waits=waits)
    return replace(rest, text=begun.text + rest.text)
