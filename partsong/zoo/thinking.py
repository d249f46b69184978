"""Zoo models that were trained to think with many calls: how answers are found, what strategies are given for them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from partsong.zoo.registry import MODELS

__all__ = ["knobs_for", "task_of"]


def task_of(model: Any) -> Any:
    """The task of a zoo model that was trained to think; None for all other models.

    Args:
        model: what a user calls it.

    >>> task_of("sums").answer_of("3+4=7. answer: 7"), task_of("lists-ar"), task_of("/models/other")
    ('7', None, None)
    """
    row = MODELS.get(model) if isinstance(model, str) else None
    return None if row is None or not hasattr(row.task, "thinking_knobs") else row.task


def knobs_for(model: Any, strategy: str, given: Collection[str] = ()) -> dict[str, Any]:
    """What a zoo model wants a strategy to be given, such as prompts of its language.

    Args:
        model: what a user calls it.
        strategy: its name, such as "pdr".
        given: names of knobs that somebody has set; they stay.

    >>> sorted(knobs_for("sums", "pdr", ["keep"])), knobs_for("smollm2-135m", "pdr")
    (['distillation', 'prompts'], {})
    """
    task = task_of(model)
    own = {} if task is None else task.thinking_knobs(strategy)
    return {name: value for name, value in own.items() if name not in given}
