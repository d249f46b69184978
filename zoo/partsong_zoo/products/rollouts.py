"""Samples a model that thinks in threads through the runtime, and rewards the samples. Loads torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.strategies.single import single
from partsong.reasoning.threads import layout
from partsong.reasoning.threads.formats import Format
from partsong.seeds import derive
from partsong_zoo.products.problems import ProductProblem, answer_of, check
from partsong_zoo.products.training import Speech
from partsong_zoo.training.rewards import accelerated_reward, alternating_reward, group_advantages
from partsong_zoo.training.rollouts import drawn_parts, has_forked

__all__ = ["Rollout", "rewards_of", "roll_out"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """Holds a sampled text.

    Attributes:
        tokens: the question and what was drawn, as a tree; a policy learns the latter.
        right: whether its answer is right.
        forked: whether it has threads, in the valid form.
        total: how many tokens were drawn.
        critical: how many tokens the longest chain of calls that waited for each other has.
    """

    tokens: layout.Tokens
    right: bool
    forked: bool
    total: int
    critical: int


async def roll_out(
    engine: Engine,
    problems: Sequence[ProductProblem],
    form: Format | None,
    speech: Speech,
    *,
    num: int,
    seed: int,
    max_tokens: int,
) -> list[Rollout]:
    """Samples texts at temperature 1, all at once.

    Args:
        engine: an engine with the model.
        problems: the problems.
        form: the format of the threads; None asks for one text.
        speech: how texts become tokens.
        num: how many samples each problem gets.
        seed: the seed of all draws.
        max_tokens: how many tokens a thread may have; the text around threads may have eight times as many.

    Returns:
        The samples, those of one problem side by side.
    """
    parameters = Parameters(max_tokens=8 * max_tokens)

    async def one(number: int, problem: ProductProblem, sample: int) -> Rollout:
        run = Run(engine, seed=derive(seed, number, sample), name=f"{number}/{sample}")
        options: dict[str, Any] = {"extract": answer_of, "parameters": parameters}
        if form is None:
            answer = await single(run, problem.question, **options)
        else:
            threads = {"format": form.name, "teach": False, "max_depth": 1, "thread_tokens": max_tokens}
            answer = await fork_join(run, problem.question, **threads, **options)
        parts = layout.encoded(drawn_parts(run, answer, form, speech.end), speech.encode)
        return Rollout(
            tokens=(layout.TokenRun(tuple(speech.prompt(problem.question))), *parts),
            right=answer.answer is not None and check(problem.question, answer.answer),
            forked=has_forked(answer),
            total=max(1, answer.summary["tokens_total"]),
            critical=max(1, answer.summary["tokens_critical"]),
        )

    return list(await asyncio.gather(*(one(n, p, s) for n, p in enumerate(problems) for s in range(num))))


def rewards_of(
    rollouts: Sequence[Rollout],
    step: int,
    *,
    reward: Literal["accelerated", "alternating"],
    scale: Literal["none", "deviation"],
    group: Count,
) -> tuple[list[float], list[float]]:
    """Computes rewards and advantages of samples, group by group.

    Args:
        rollouts: the samples as `roll_out` returns them.
        step: the step of training.
        reward: "accelerated" (ThreadWeaver) or "alternating" (Parallel-R1).
        scale: the scale of the advantages; see `group_advantages`.
        group: how many samples each problem has.

    Raises:
        ArgumentError: the reward is unknown, or the groups are not whole.
    """
    check_knobs(type_hints(rewards_of), {"reward": reward, "group": group})
    if len(rollouts) % group:
        raise ArgumentError(f"group={group}, but there are {len(rollouts)} samples; use whole groups")
    rewards = [
        accelerated_reward(one.right, one.total, one.critical)
        if reward == "accelerated"
        else alternating_reward(one.right, one.forked, step)
        for one in rollouts
    ]
    groups = [rewards[first : first + group] for first in range(0, len(rewards), group)]
    return rewards, [advantage for each in groups for advantage in group_advantages(each, scale=scale)]
