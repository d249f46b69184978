"""Knows the zoo models that think with many calls: how their answers are found, and which knobs strategies need."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from partsong.zoo.registry import MODELS

__all__ = ["knobs_for", "task_of"]


def task_of(model: Any) -> Any:
    """Returns the task of a zoo model that was trained to think; None for all other models.

    Args:
        model: the name that a user gave.

    >>> task_of("sums").answer_of("3+4=7. answer: 7"), task_of("lists-ar"), task_of("/models/other")
    ('7', None, None)
    """
    row = MODELS.get(model) if isinstance(model, str) else None
    return None if row is None or not hasattr(row.task, "thinking_knobs") else row.task


def knobs_for(model: Any, strategy: str, chosen: Collection[str] = ()) -> dict[str, Any]:
    """Returns the knobs that a zoo model needs for a strategy, such as prompts in its language.

    Args:
        model: the name that a user gave.
        strategy: the name of the strategy, such as "pdr".
        chosen: names of knobs that the user has set; they stay.

    >>> sorted(knobs_for("sums", "pdr", ["keep"])), knobs_for("smollm2-135m", "pdr")
    (['distillation', 'prompts'], {})
    """
    task = task_of(model)
    own = {} if task is None else task.thinking_knobs(strategy)
    return {name: value for name, value in own.items() if name not in chosen}
