"""Reads the prompts of a comparison: a text file, JSON lines, a folder of texts, or the captions of a zoo model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.knobs import did_you_mean
from partsong.whole_text import whole_text

__all__ = ["CAPTIONS", "read_prompts"]

#: Captions that are drawn where neither prompts nor their number are given.
CAPTIONS = 20


def read_prompts(
    sources: Sequence[str], num: int | None = None, *, model: str | None = None, seed: int = 0
) -> list[str]:
    r"""Returns one prompt for each picture.

    Args:
        sources: where the prompts are, one source after another. Each is a text file with a prompt on a line; a
            ``.jsonl`` file whose lines are objects with a field ``prompt``, such as GenEval's; a folder with a prompt
            in each ``.txt`` file, such as DPG-Bench's, in the order of their names; or the name of a zoo model, for
            captions of its task. None given stands for the captions of `model`.
        num: how many pictures. Default: one for each prompt, or 20 captions. Where there are fewer prompts, they are
            used again in turn.
        model: what is sampled.
        seed: of the captions.

    Raises:
        ArgumentError: a source is missing, cannot be read or holds no prompt; or there is none and `model` has no
            captions of its own.

    Example:
        >>> read_prompts([], 2, model="shapes") == read_prompts(["shapes"], 2)
        True
    """
    if not sources:
        if model not in zoo.MODELS:
            raise ArgumentError(
                f"{model} has no captions of its own; give --prompts, such as a file with one on a line"
            )
        sources = (str(model),)
    prompts = [prompt for source in sources for prompt in _read(source, num or CAPTIONS, seed)]
    return [prompts[number % len(prompts)] for number in range(num or len(prompts))]


def _read(source: str, num: int, seed: int) -> list[str]:
    path = Path(source).expanduser()
    if not path.exists():
        return _captions(source, num, seed)
    try:
        if path.is_dir():
            texts = [file.read_text(encoding="utf-8") for file in sorted(path.glob("*.txt"))]
        elif path.suffix.lower() in (".jsonl", ".json"):
            lines = path.read_text(encoding="utf-8").splitlines()
            texts = [_field(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        else:
            texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--prompts {source} cannot be read: {error}") from error
    prompts = [whole_text(text.strip()) for text in texts if text.strip()]
    if not prompts:
        inside = "no .txt file with a text" if path.is_dir() else "no line with a text"
        raise ArgumentError(f"--prompts {source} holds no prompt: {inside}")
    return prompts


def _field(path: Path, number: int, line: str) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ArgumentError(f"--prompts {path}: line {number} is not JSON ({error})") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise ArgumentError(f"--prompts {path}: line {number} is no object with a text in its field prompt")
    return prompt


def _captions(name: str, num: int, seed: int) -> list[str]:
    tasks = {known: row.task for known, row in zoo.MODELS.items() if hasattr(row.task, "captions")}
    if name not in tasks:
        raise ArgumentError(
            f"--prompts {name}: no such file or folder, and no zoo model with captions{did_you_mean(name, tasks)}"
        )
    return list(tasks[name].captions(num, seed))
