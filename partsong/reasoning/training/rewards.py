"""Rewards of texts written in threads, and advantages of a group of them. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from partsong.errors import ArgumentError

__all__ = ["acceleration", "accelerated_reward", "alternating_reward", "group_advantages"]


def alternating_reward(
    correct: bool, parallel: bool, step: int, *, period: int = 10, parallel_steps: int = 2, bonus: float = 0.2
) -> float:
    """Right answers alone count in most steps; in some, right ones that were thought in threads count for more.

    Source: Parallel-R1, arXiv 2509.07980, stage 2. There 8 of 10 steps give +1 or -1, and 2 of 10 give 1.2 to a right
    answer with threads in the valid form, 1.0 to a right one without, -1 to a wrong one.

    Args:
        correct: whether the answer is right.
        parallel: whether the text forked, in the valid form.
        step: of training, counted from 0; the last steps of each period look at threads.
        period: steps after which that begins anew.
        parallel_steps: of those, steps that look at threads.
        bonus: what threads add there.

    Returns:
        The reward.

    Raises:
        ArgumentError: a negative step, or more such steps than the period has.

    >>> [alternating_reward(True, True, step) for step in (0, 7, 8, 9, 10)]
    [1.0, 1.0, 1.2, 1.2, 1.0]
    """
    if period < 1 or not 0 <= parallel_steps <= period or step < 0:
        raise ArgumentError(
            f"step={step}, period={period}, parallel_steps={parallel_steps}; use a step of 0 or more and at most as "
            f"many parallel steps as the period has"
        )
    if not correct:
        return -1.0
    looks = step % period >= period - parallel_steps
    return 1.0 + bonus * (looks and parallel)


def acceleration(total: int, critical: int, form: Literal["share", "ratio"] = "share") -> float:
    """How much shorter the longest chain of tokens is than all tokens one behind the other.

    The published description and the published code of ThreadWeaver (arXiv 2512.07843) differ: the one has the ratio of
    the two minus 1, the other the share that is saved. Both are 0 without threads; the ratio has no upper end.

    Args:
        total: tokens of all threads.
        critical: tokens of the longest chain of them.
        form: "share", ``1 - critical / total``, or "ratio", ``total / critical - 1``.

    Raises:
        ArgumentError: counts that cannot be, or another form.

    >>> acceleration(200, 100), acceleration(200, 100, "ratio")
    (0.5, 1.0)
    """
    if not 0 < critical <= total:
        raise ArgumentError(
            f"critical={critical} of total={total} tokens; a chain has at least 1 and at most all of them"
        )
    if form not in ("share", "ratio"):
        raise ArgumentError(f"form={form!r}; use 'share' or 'ratio'")
    return 1.0 - critical / total if form == "share" else total / critical - 1.0


def accelerated_reward(
    correct: bool,
    total: int,
    critical: int,
    *,
    factor: float = 0.5,
    most: float = 0.2,
    form: Literal["share", "ratio"] = "share",
) -> float:
    """1 for a right answer, and a little more the more of its tokens were written side by side; 0 for a wrong one.

    Source: ThreadWeaver, arXiv 2512.07843: ``correct + factor * min(acceleration, most)``, where only right answers
    are accelerated. So no speed makes up for a wrong answer.

    Args:
        correct: whether the answer is right.
        total: tokens of all threads.
        critical: tokens of the longest chain of them.
        factor: weight of the acceleration.
        most: acceleration above which more brings nothing.
        form: as in `acceleration`.

    Raises:
        ArgumentError: counts that cannot be, a negative factor or limit.

    >>> accelerated_reward(True, 100, 90), accelerated_reward(True, 100, 50), accelerated_reward(False, 100, 50)
    (1.05, 1.1, 0.0)
    """
    if factor < 0 or most < 0:
        raise ArgumentError(f"factor={factor}, most={most}; use numbers of at least 0")
    gain = min(acceleration(total, critical, form), most)
    return 1.0 + factor * gain if correct else 0.0


def group_advantages(
    rewards: Sequence[float], *, scale: Literal["none", "deviation"] = "none", epsilon: float = 1e-4
) -> list[float]:
    """How much better each text of a group is than their mean.

    With "none" that is all (mean-only, ThreadWeaver's P-GRPO, arXiv 2512.07843): where all answers are right, small
    differences of speed stay small. With "deviation" it is divided by the standard deviation of the group (GRPO, arXiv
    2402.03300), which makes them as large as the difference between right and wrong.

    Args:
        rewards: of the texts that answer one question.
        scale: "none" or "deviation", that of a sample, divided by ``len(rewards) - 1``.
        epsilon: added to the deviation.

    Returns:
        One number per text; their sum is 0.

    Raises:
        ArgumentError: fewer than two rewards, one that is no number, or another scale.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0])
    [0.5, -0.5, -0.5, 0.5]
    """
    if len(rewards) < 2:
        raise ArgumentError(f"a group has at least 2 texts to compare, found {len(rewards)}")
    if scale not in ("none", "deviation"):
        raise ArgumentError(f"scale={scale!r}; use 'none' or 'deviation'")
    if not all(map(math.isfinite, rewards)):
        raise ArgumentError(f"rewards are finite numbers, found {list(rewards)}")
    mean = math.fsum(rewards) / len(rewards)
    found = [reward - mean for reward in rewards]
    if scale == "none":
        return found
    deviation = math.sqrt(math.fsum(one * one for one in found) / (len(rewards) - 1))
    return [one / (deviation + epsilon) for one in found]
