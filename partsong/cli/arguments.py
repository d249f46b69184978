"""Reads ``--set KEY=VALUE``, the arguments of a pipeline's call that have no option of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from partsong.errors import ArgumentError
from partsong.whole_text import whole_json, whole_text

__all__ = ["read_arguments"]

#: Arguments that have an option of their own or that decide how the result is used, and what to use instead.
ELSEWHERE = {
    "prompt": "give it as PROMPT",
    "class_labels": "give it as PROMPT",
    "negative_prompt": "use --negative-prompt",
    "num_inference_steps": "use --steps",
    "guidance_scale": "use --guidance",
    "height": "use --height",
    "width": "use --width",
    "num_images_per_prompt": "use --num-images",
    "generator": "use --seed",
    "output_type": "partsong writes the files",
    "num_frames": "use --frames",
    "return_dict": "partsong reads the result",
}
WORDS = {"true": True, "false": False, "none": None, "null": None}


def read_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """Reads arguments into a dictionary by name.

    Args:
        texts: ``KEY=VALUE`` each. A value is a number, ``true``, ``false`` or ``none``. It is read as JSON if it begins
            like a list, an object or a quoted text. Anything else is a text as it stands.

    Raises:
        ArgumentError: a text has no ``KEY=``, a key comes twice or has an option of its own, or a value cannot be read.

    Example:
        >>> read_arguments(["true_cfg_scale=4.5", "sigmas=[1.0, 0.5]", "prompt_2=a lighthouse"])
        {'true_cfg_scale': 4.5, 'sigmas': [1.0, 0.5], 'prompt_2': 'a lighthouse'}
    """
    arguments: dict[str, Any] = {}
    for text in map(whole_text, texts):
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ArgumentError(f"--set {text}: write KEY=VALUE, with the name of an argument of the pipeline's call")
        if key in ELSEWHERE:
            raise ArgumentError(f"--set {text}: {ELSEWHERE[key]}")
        if key in arguments:
            raise ArgumentError(f"--set {text}: {key} is given twice")
        arguments[key] = _read(text, value)
    return arguments


def _read(text: str, value: str) -> Any:
    if value.lower() in WORDS:
        return WORDS[value.lower()]
    if value[:1] in ("[", "{", '"'):
        try:
            return whole_json(json.loads(value))
        except ValueError as error:
            raise ArgumentError(f"--set {text}: the value begins like JSON but is not valid JSON ({error})") from error
    number = _number(value)
    if number is not None and not math.isfinite(number):
        raise ArgumentError(f"--set {text}: not a finite number")
    return value if number is None else number


def _number(value: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return None
