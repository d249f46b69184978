"""Counts tokens that differ with and without drafts: ``python benchmarks/speculation/speculation_exact.py``.

The zoo's causal models in float64 answer many prompts at three settings under every drafter, one that guesses at random
and one that is always wrong among them. SmolLM2 in float32 is compared with transformers' ``generate``, too: there,
a token may differ where the two likeliest candidates are nearly equal, and these are counted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.kernels.speculation import DraftText, DraftTree, Observation
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.speculation.assistant import Assistant
from partsong_zoo.lists.tasks import examples as list_examples
from partsong_zoo.sums import examples as sum_examples

SETTINGS: tuple[tuple[float, float], ...] = ((0.0, 1.0), (0.7, 0.9), (1.0, 1.0))
#: Two candidates this close differ only by rounding.
CLOSE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to compare."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    prompts: int = 1000
    """Prompts of each zoo model."""
    smollm2: int = 0
    """Prompts of SmolLM2, 32 tokens each; 0 leaves it out."""


@dataclass
class Guesses:
    """A drafter that needs nothing: guesses a chain by a function of the text."""

    guess: Callable[[list[int], random.Random], int]
    layers: tuple[int, ...] = ()
    masks: int = 0

    def validate(self) -> None:
        """Has no knobs to check."""

    def build(self, model: Any, tokenizer: Any) -> Guesses:
        """Needs no model."""
        return self

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses up to five tokens."""
        drafts = []
        for text, room in zip(texts, rooms, strict=True):
            dice = random.Random(repr(text.tokens[-20:]))
            drafts.append(DraftTree.chain([self.guess(text.tokens, dice) for _ in range(min(room, 5))]))
        return drafts

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns nothing."""

    def forget(self, text: DraftText) -> None:
        """Keeps nothing."""


def drafters(model: str, size: int) -> dict[str, Any]:
    """Every drafter, by name; the assistant is the model itself in groups of three layers."""
    every: dict[str, Any] = {
        "ngram": "ngram",
        "jacobi": "jacobi",
        "ngram + jacobi": ["ngram", "jacobi"],
        "assistant, two branches": Assistant(model=model, group=3, branches=2, cost=0.0),
        "random": Guesses(lambda tokens, dice: dice.randrange(size)),
        # Token 0 pads: no answer has it.
        "always wrong": Guesses(lambda tokens, dice: 0),
        "head": "head",
    }
    return every | ({"masked": "masked"} if model.startswith("lists") else {})


def answer(engine: LocalEngine, requests: Sequence[Request]) -> list[Completion]:
    """Answers all requests at once and closes the engine."""

    async def main() -> list[Completion]:
        try:
            return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            await engine.close()

    return asyncio.run(main())


def zoo_rows(model: str, prompts: list[str], max_tokens: int) -> list[dict[str, Any]]:
    """Compares every drafter with plain decoding."""
    rows = []
    for temperature, top_p in SETTINGS:
        parameters = Parameters(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        requests = [
            Request(messages=(Message("user", (prompt,)),), parameters=parameters, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
        options = {"dtype": torch.float64, "cache_mb": 0, "step_costs": {1: 1.0, 1024: 1.0}}
        plain = answer(LocalEngine(model, **options), requests)
        with_size = LocalEngine(model)
        for name, drafter in drafters(model, with_size.model.vocab_size).items():
            fast = answer(LocalEngine(model, speculate=drafter, **options), requests)
            rows.append(
                {
                    "name": f"{model}, {name}",
                    "size": f"T={temperature} top-p {top_p}",
                    "prompts": len(prompts),
                    "tokens": sum(each.usage.completion for each in plain),
                    "differing_answers": sum(
                        a.tokens != b.tokens or a.usage.completion != b.usage.completion
                        for a, b in zip(plain, fast, strict=True)
                    ),
                    "drafted": sum(each.usage.drafted for each in fast),
                    "rejected": sum(each.usage.rejected for each in fast),
                }
            )
            print(rows[-1], flush=True)
        asyncio.run(with_size.close())
    return rows


def smollm2_row(prompts: list[str]) -> dict[str, Any]:
    """Compares greedy answers of SmolLM2 with drafts to transformers' ``generate``, prompt by prompt."""
    from transformers import AutoModelForCausalLM

    from partsong.reasoning.local import smollm2
    from partsong.reasoning.local.prompt import prompt_ids

    module: Any = AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.float32).eval()
    engine = LocalEngine("smollm2-135m", speculate=["ngram", "jacobi"], cache_mb=0, end_tokens=())
    parameters = Parameters(max_tokens=32, temperature=0.0)
    requests = [Request(messages=(Message("user", (prompt,)),), parameters=parameters) for prompt in prompts]
    tokenizer = engine.tokenizer
    answers = answer(engine, requests)
    differing, close = 0, 0
    for request, found in zip(requests, answers, strict=True):
        ids = torch.tensor([prompt_ids(tokenizer, request.messages)])
        out = module.generate(
            ids, do_sample=False, max_new_tokens=32, min_new_tokens=32, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        own, other = list(found.tokens or ()), out.sequences[0, ids.shape[1] :].tolist()
        first = next((place for place, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
        if first is not None:
            top = out.logits[first][0].topk(2).values
            differing, close = differing + 1, close + bool(top[0] - top[1] < CLOSE)
    return {
        "name": "SmolLM2-135M float32, ngram + jacobi, against generate",
        "size": "T=0, 32 tokens",
        "prompts": len(prompts),
        "tokens": sum(each.usage.completion for each in answers),
        "differing_answers": differing,
        "differing_where_the_top_two_are_close": close,
        "drafted": sum(each.usage.drafted for each in answers),
        "rejected": sum(each.usage.rejected for each in answers),
    }


def main(config: Config) -> None:
    """Compares and writes the files."""
    torch.set_num_threads(1)
    rows = zoo_rows("lists-ar", [each.prompt for each in list_examples(config.prompts, 5)], 24)
    rows += zoo_rows("sums", [each.question for each in sum_examples(config.prompts, 5)], 48)
    if config.smollm2:
        rows.append(smollm2_row([f"{each.question} Explain." for each in sum_examples(config.smollm2, 6)]))
    columns = ("name", "size", "prompts", "tokens", "differing_answers", "drafted", "rejected")
    table = markdown_table(columns, [[row[column] for column in columns] for row in rows])
    note = (
        "Answers with drafts against answers without them: every prompt, setting and drafter. `differing_answers` "
        "counts answers in which any token differs. Every guess is verified here, whether it pays or not."
    )
    if config.smollm2:
        close = rows[-1]["differing_where_the_top_two_are_close"]
        note += f" Of SmolLM2's, {close} differ first where the two likeliest tokens are closer than {CLOSE}."
    file_result(config.out, __file__, rows, "Drafts change no token", note, table)


if __name__ == "__main__":
    main(tyro.cli(Config))
