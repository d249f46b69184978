"""A tiny random Llama in float64 with one token per letter, and its answers worked out in the plainest way."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.local import LocalEngine
from tests.tiny_models.text import causal_model, letter_tokenizer

EOS = 1
LETTERS = "abcdefghijklmnopqrstuvwxyz .:"
CONTEXT = 96


def tokenizer() -> PreTrainedTokenizerFast:
    return letter_tokenizer(["<pad>", "<eos>", *LETTERS])


def llama(seed: int = 0, **more: Any) -> LlamaForCausalLM:
    # Wide weights: logits differ by much more than rounding, and the context matters.
    sizes = {"vocab_size": len(LETTERS) + 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.4}
    return causal_model("llama", seed, **sizes | more)


def engine(model: LlamaForCausalLM | None = None, **more: Any) -> LocalEngine:
    return LocalEngine(llama() if model is None else model, tokenizer=tokenizer(), **more)


def request(text: str, seed: int = 0, **asked: Any) -> Request:
    parameters = Parameters(**{"max_tokens": 12, **asked})
    return Request(messages=(Message("user", (text,)),), parameters=parameters, seed=seed)


@torch.no_grad()
def reference(model: LlamaForCausalLM, asked: Request) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens and the logits they were drawn from, one full forward of the stock model per token, no cache."""
    ids: list[int] = tokenizer()(asked.messages[0].text).input_ids
    begin, logits = len(ids), list[torch.Tensor]()
    how = asked.parameters
    while len(ids) - begin < how.max_tokens and len(ids) < CONTEXT and EOS not in ids[begin:]:
        logits.append(model(torch.tensor([ids])).logits[0, -1])
        place = len(ids) - begin
        ids.append(draw(logits[-1][None], [TokenDraw(how.temperature, how.top_p, asked.seed, place)])[0])
    return ids[begin:], logits


def text_of(ids: Sequence[int]) -> str:
    return "".join(LETTERS[index - 2] for index in ids if index > 1)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


async def all_of(local: LocalEngine, requests: Sequence[Request]) -> list[Completion]:
    """Answers asked for at once; the engine is closed behind them."""
    try:
        return list(await asyncio.gather(*map(local.generate, requests)))
    finally:
        await local.close()
