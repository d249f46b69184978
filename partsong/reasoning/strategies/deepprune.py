"""DeepPrune detects early which samples lead to the same answer and finishes only one of each group."""

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

    The beginnings are grouped one by one. Each is compared with up to `members` of every group. It joins the group with
    the highest mean if that is above `threshold`, and otherwise begins a group of its own. `keep` samples of each group
    continue the message they began; the others cost nothing more.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        num: samples begun.
        prefix_tokens: tokens of a beginning.
        judge: takes (question, one, other) and returns the chance that two beginnings lead to the same answer; may be
            async. None asks the model, with calls that count like all others.
        threshold: mean chance above which a beginning joins a group.
        members: most members of a group a beginning is compared with; the first ones are taken.
        most_clusters: most groups. Once they are there, every further beginning joins the best of them.
        keep: samples finished per group.
        vote: with "traces" each finished sample has one vote, as in the paper. With "sizes" those of a group share as
            many votes as beginnings joined it: the vote of all samples wherever the judge is right.
        prompts: its prompts.
        parameters: how samples are drawn; `max_tokens` counts for a whole sample.

    Returns:
        The answer. ``details`` hold what those of `self_consistency` hold, and ``clusters``, the numbers of the samples
        of each group.

    Raises:
        ArgumentError: a knob is out of range, or a beginning would be as long as a whole sample.

    Source: DeepPrune, arXiv 2510.08483.
    """
    settings = parameters or Parameters()
    if prefix_tokens >= settings.max_tokens:
        raise ArgumentError(f"prefix_tokens={prefix_tokens} of max_tokens={settings.max_tokens}; begin with fewer")
    chat, begin = [Message("user", (question,))], replace(settings, max_tokens=prefix_tokens)
    beginnings = await together(run.call(chat, path=("begin",), sample=i, parameters=begin) for i in range(num))
    begun = {i: completion for i, completion in enumerate(beginnings) if completion is not None}
    groups = Groups(run, question, judge, threshold, members, most_clusters, prompts, begun)
    spent = len(begun) < num or not await groups.sort()
    chosen = [i for group in groups.groups for i in group[:keep]]
    limits = replace(settings, max_tokens=settings.max_tokens - prefix_tokens)
    ended = await together(_finish(run, chat, begun[i], i, groups.last, limits) for i in chosen)
    done = {i: completion for i, completion in zip(chosen, ended, strict=True) if completion is not None}
    poll = Poll(num, extract)
    for group in groups.groups:
        named = sum(vote_of(done[i], extract) is not None for i in group[:keep] if i in done)
        for i in group[:keep]:
            if i in done:
                poll.count(i, done[i], len(group) / max(1, named) if vote == "sizes" else 1.0)
    stopped = "budget" if spent or None in ended else "done"
    return poll.answer(run, stopped, clusters=[list(group) for group in groups.groups])


async def _finish(
    run: Run, chat: Sequence[Message], begun: Completion, number: int, waits: Sequence[str], limits: Parameters
) -> Completion:
    """Writes the rest of a beginning; a finished one is returned unchanged."""
    if begun.finish == "stop":
        return begun
    prompt = [*chat, Message("assistant", (begun.piece,))]
    rest = await run.call(prompt, path=("finish",), sample=number, parameters=limits, waits=waits)
    return replace(rest, text=begun.text + rest.text)
