"""Counts how many layer-parallel drafts are right: ``python benchmarks/speculation/layer_parallel.py``.

SmolLM2-135M drafts for itself with groups of its layers attending from the same state, so any loss is due
only to the groups. No smaller relative of a larger model is available. Drafts that share the model's noise are compared
with drafts of the likeliest token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.speculation.speculation_prompts import PROMPTS
from partsong.kernels.speculation import Drafter, DraftText, DraftTree, Observation
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.speculation.assistant import Assistant


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to count."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    groups: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Layers in a group."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Temperatures of the answers."""
    new_tokens: int = 48
    """Tokens of an answer."""
    length: int = 4
    """Guesses in a step."""


@dataclass(frozen=True)
class Likeliest:
    """Guesses as an assistant does, but without the noise of the text."""

    assistant: Assistant

    def validate(self) -> None:
        """Checks the assistant's knobs."""
        self.assistant.validate()

    def build(self, model: Any, tokenizer: Any) -> Drafter:
        """Makes the drafter."""
        return _WithoutNoise(self.assistant.build(model, tokenizer))


class _WithoutNoise:
    layers: tuple[int, ...] = ()
    masks: int = 0

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self._twins: dict[DraftText, DraftText] = {}

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        return self._inner.propose([self._twin(text) for text in texts], rooms)

    def observe(self, text: DraftText, seen: Observation) -> None:
        self._inner.observe(self._twin(text), seen)

    def forget(self, text: DraftText) -> None:
        self._inner.forget(self._twin(text))
        self._twins.pop(text, None)

    def _twin(self, text: DraftText) -> DraftText:
        twin = self._twins.setdefault(text, DraftText([], text.draw, text.plain))
        twin.tokens, twin.draw = text.tokens, replace(text.draw, temperature=0.0)
        return twin


def answers(drafter: Any, temperature: float, config: Config) -> list[Completion]:
    """Answers all prompts together."""
    parameters = Parameters(max_tokens=config.new_tokens, temperature=temperature)
    prompts = [prompt for kind in ("prose", "code") for prompt in PROMPTS[kind]]
    requests = [
        Request(messages=(Message("user", (prompt,)),), parameters=parameters, seed=seed)
        for seed, prompt in enumerate(prompts)
    ]

    async def main() -> list[Completion]:
        engine = LocalEngine("smollm2-135m", speculate=drafter, step_costs={1: 1.0, 512: 1.0}, end_tokens=())
        try:
            return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            await engine.close()

    return asyncio.run(main())


def row(name: str, drafter: Any, temperature: float, config: Config, plain: Sequence[Completion]) -> Mapping[str, Any]:
    """Counts the right guesses of a drafter."""
    fast = answers(drafter, temperature, config)
    drafted, rejected = (sum(getattr(each.usage, key) for each in fast) for key in ("drafted", "rejected"))
    steps = drafted / config.length
    return {
        "name": name,
        "size": f"T={temperature}",
        "differing_answers": sum(a.tokens != b.tokens for a, b in zip(plain, fast, strict=True)),
        "drafted": drafted,
        "right": drafted - rejected,
        "right_per_step": (drafted - rejected) / steps,
    }


def main(config: Config) -> None:
    """Counts and writes the files."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for temperature in config.temperatures:
        plain = answers(None, temperature, config)
        for group in config.groups:
            assistant = Assistant(model="smollm2-135m", group=group, cost=0.0, length=config.length)
            kinds: dict[str, Any] = {f"groups of {group}": assistant}
            if temperature:
                kinds[f"groups of {group}, likeliest tokens"] = Likeliest(assistant)
            for name, drafter in kinds.items():
                rows.append(dict(row(name, drafter, temperature, config, plain)))
                print(rows[-1], flush=True)
    columns = list(rows[0])
    shown = [[f"{each[c]:.2f}" if isinstance(each[c], float) else each[c] for c in columns] for each in rows]
    note = (
        f"SmolLM2-135M float32, ten prompts, {config.new_tokens} tokens each, {config.length} guesses in every step. "
        "`right_per_step` is how many of them are kept on average; a step writes one token more than that."
    )
    table = markdown_table(columns, shown)
    file_result(config.out, __file__, rows, "Layer-parallel drafts", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
