"""Computes rewards of texts written in threads, and advantages within a group of them. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from partsong.errors import ArgumentError
from partsong.knobs import Count, Number, Whole, check_knobs, type_hints

__all__ = ["acceleration", "accelerated_reward", "alternating_reward", "group_advantages"]


def alternating_reward(
    correct: bool,
    parallel: bool,
    step: Annotated[int, Whole(0)],
    *,
    period: Count = 10,
    parallel_steps: Annotated[int, Whole(0)] = 2,
    bonus: float = 0.2,
) -> float:
    """Rewards only right answers in most steps; in some, right answers found in threads get more.

    Source: Parallel-R1, arXiv 2509.07980, stage 2. There 8 of 10 steps give +1 or -1, and 2 of 10 give 1.2 to a right
    answer with threads in the valid form, 1.0 to a right one without, -1 to a wrong one.

    Args:
        correct: whether the answer is right.
        parallel: whether the text forked, in the valid form.
        step: the step of training, from 0; the last steps of each period reward threads.
        period: how many steps a period has.
        parallel_steps: how many of them reward threads.
        bonus: what threads add in these steps.

    Returns:
        The reward.

    Raises:
        ArgumentError: a knob is out of bounds, or more steps reward threads than the period has.

    >>> [alternating_reward(True, True, step) for step in (0, 7, 8, 9, 10)]
    [1.0, 1.0, 1.2, 1.2, 1.0]
    """
    knobs = {"step": step, "period": period, "parallel_steps": parallel_steps}
    check_knobs(type_hints(alternating_reward), knobs)
    if parallel_steps > period:
        raise ArgumentError(f"parallel_steps={parallel_steps} of period={period} steps; use at most {period}")
    if not correct:
        return -1.0
    looks = step % period >= period - parallel_steps
    return 1.0 + bonus * (looks and parallel)


def acceleration(total: int, critical: int, form: Literal["share", "ratio"] = "share") -> float:
    """Says how much shorter the longest chain of tokens is than all tokens in sequence.

    The published description and the published code of ThreadWeaver (arXiv 2512.07843) differ: the former has the ratio
    of the two minus 1, the latter the share that is saved. Both are 0 without threads. The ratio has no upper end.

    Args:
        total: how many tokens all threads have.
        critical: how many tokens their longest chain has.
        form: "share", ``1 - critical / total``, or "ratio", ``total / critical - 1``.

    Raises:
        ArgumentError: the chain has no tokens or more than all threads, or the form is unknown.

    >>> acceleration(200, 100), acceleration(200, 100, "ratio")
    (0.5, 1.0)
    """
    if not 0 < critical <= total:
        raise ArgumentError(
            f"critical={critical} of total={total} tokens; a chain has at least 1 and at most all of them"
        )
    check_knobs(type_hints(acceleration), {"form": form})
    return 1.0 - critical / total if form == "share" else total / critical - 1.0


def accelerated_reward(
    correct: bool,
    total: int,
    critical: int,
    *,
    factor: Annotated[float, Number(0)] = 0.5,
    most: Annotated[float, Number(0)] = 0.2,
    form: Literal["share", "ratio"] = "share",
) -> float:
    """Gives 1 for a right answer, a little more if its tokens were written side by side, and 0 for a wrong one.

    Source: ThreadWeaver, arXiv 2512.07843: ``correct + factor * min(acceleration, most)``, where only right answers
    are accelerated. So no speed makes up for a wrong answer.

    Args:
        correct: whether the answer is right.
        total: how many tokens all threads have.
        critical: how many tokens their longest chain has.
        factor: weight of the acceleration.
        most: the acceleration above which more adds nothing.
        form: as in `acceleration`.

    Raises:
        ArgumentError: as in `acceleration`, or a negative factor or limit.

    >>> accelerated_reward(True, 100, 90), accelerated_reward(True, 100, 50), accelerated_reward(False, 100, 50)
    (1.05, 1.1, 0.0)
    """
    check_knobs(type_hints(accelerated_reward), {"factor": factor, "most": most})
    gain = min(acceleration(total, critical, form), most)
    return 1.0 + factor * gain if correct else 0.0


def group_advantages(
    rewards: Sequence[float], *, scale: Literal["none", "deviation"] = "none", epsilon: float = 1e-4
) -> list[float]:
    """Says how much better each text of a group is than their mean.

    With "none" that is all (mean-only, ThreadWeaver's P-GRPO, arXiv 2512.07843): if all answers are right, small
    differences of speed stay small. With "deviation" it is divided by the standard deviation of the group (GRPO, arXiv
    2402.03300), which makes them as large as the difference between right and wrong.

    Args:
        rewards: the rewards of the texts that answer one question.
        scale: "none" or "deviation", that of a sample, divided by ``len(rewards) - 1``.
        epsilon: added to the deviation.

    Returns:
        One number per text; their sum is 0.

    Raises:
        ArgumentError: there are fewer than two rewards, one is not a finite number, or the scale is unknown.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0])
    [0.5, -0.5, -0.5, 0.5]
    """
    if len(rewards) < 2:
        raise ArgumentError(f"a group has at least 2 texts to compare, found {len(rewards)}")
    check_knobs(type_hints(group_advantages), {"scale": scale})
    if not all(map(math.isfinite, rewards)):
        raise ArgumentError(f"rewards are finite numbers, found {list(rewards)}")
    mean = math.fsum(rewards) / len(rewards)
    above = [reward - mean for reward in rewards]
    if scale == "none":
        return above
    deviation = math.sqrt(math.fsum(one * one for one in above) / (len(rewards) - 1))
    return [one / (deviation + epsilon) for one in above]
