"""Times text decoding against its slow twin and against transformers' generate, in turn in one process.

The models are random and small, but with a public vocabulary: 126464 tokens, as LLaDA has. Everything from prompts to
tokens is timed, and both sides make the same number of forwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.text.plain_decode import plain_decode
from partsong.samplers.text.decode import decode
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.runner import StockTextModel

__all__ = ["bench_text_model", "run"]

VOCAB, MASK, PROMPT = 126464, 126336, 64
#: With more rows than this at once, float64 probabilities would not fit beside the logits in 24 GB.
ROWS_AT_ONCE = 8


def bench_text_model(width: int = 384, layers: int = 6, vocab: int = VOCAB) -> LlamaForCausalLM:
    """Builds a random model of LLaDA's shape, by default with 108 million parameters, 97 of them in embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


class _Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes; views of other tensors do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, t.numel() * t.element_size())
        return result


def run(
    *,
    repeats: int = 5,
    batches: tuple[int, ...] = (1, 32),
    new_tokens: int = 256,
    block_size: int = 32,
    steps_per_block: int = 1,
    model: LlamaForCausalLM | None = None,
) -> list[dict[str, Any]]:
    """Times all contests.

    Args:
        repeats: rounds; the median counts.
        batches: numbers of rows to decode at once.
        new_tokens: of each row.
        block_size: of the masked models.
        steps_per_block: forwards per block, on both sides.
        model: to time; None is `bench_text_model`.

    Returns:
        A row per contest, batch and side: ``name side batch seconds_median seconds_all tokens_per_second
        ratio_to_serial forwards largest_tensor_mb`` (only for a single text). The first side of a contest is the peer.
    """
    model = model or bench_text_model()
    mask = min(MASK, model.config.vocab_size - 1)
    rows = []
    for batch in batches:
        draw = torch.Generator().manual_seed(batch)
        prompts = torch.randint(mask, (batch, PROMPT), generator=draw)
        rows += _contest(
            "masked", _masked(model, prompts, new_tokens, block_size, steps_per_block, mask), batch, repeats
        )
        rows += _contest("causal", _causal(model, prompts, new_tokens), batch, repeats)
    for row in rows:
        row["tokens_per_second"] = row["batch"] * new_tokens / row["seconds_median"]
        row["size"] = new_tokens
    return rows


_Side = Callable[[], tuple[Any, int]]


def _masked(
    model: LlamaForCausalLM, prompts: torch.Tensor, new: int, block: int, steps: int, mask: int
) -> dict[str, _Side]:
    full = StockTextModel(model, TextAdapter(name="llada", attention="full"), mask_token_id=mask)

    def plain() -> tuple[Any, int]:
        tokens, forwards = plain_decode(
            model,
            prompts,
            mask_token_id=mask,
            max_new_tokens=new,
            block_size=block,
            steps_per_block=steps,
            rows_at_once=ROWS_AT_ONCE,
        )
        return tokens[:, prompts.shape[1] :].tolist(), forwards

    def ours(cache: str) -> _Side:
        def run_once() -> tuple[Any, int]:
            decoded = decode(
                full, prompts, rule=f"quota:steps={steps}", cache=cache, max_new_tokens=new, block_size=block
            )
            return decoded.tokens, decoded.steps

        return run_once

    return {
        "plain loop": plain,
        "decode": ours("none"),
        "decode, prefix cache": ours("prefix"),
        "decode, dual cache": ours("dual"),
    }


def _causal(model: LlamaForCausalLM, prompts: torch.Tensor, new: int) -> dict[str, _Side]:
    def generate() -> tuple[Any, int]:
        tokens = model.generate(prompts, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(prompts))
        return tokens[:, prompts.shape[1] :].tolist(), new

    def ours() -> tuple[Any, int]:
        decoded = decode(model, prompts, rule="quota", max_new_tokens=new)
        return decoded.tokens, decoded.steps

    return {"generate": generate, "decode": ours}


def _contest(name: str, sides: dict[str, _Side], batch: int, repeats: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    forwards, tokens = {}, {}
    for _ in range(repeats):
        for side, run_once in sides.items():
            start = time.perf_counter()
            tokens[side], forwards[side] = run_once()
            seconds[side].append(time.perf_counter() - start)
    first = next(iter(sides))
    rows = []
    for side, run_once in sides.items():
        largest = _Largest()
        if batch == 1:  # a batch takes minutes, and its largest tensor grows with it on every side
            with largest:
                run_once()
        same = [a == b for x, y in zip(tokens[first], tokens[side], strict=True) for a, b in zip(x, y, strict=True)]
        median = statistics.median(seconds[side])
        rows.append(
            {
                "name": name,
                "side": side,
                "batch": batch,
                "seconds_median": median,
                "seconds_all": seconds[side],
                "ratio_to_serial": statistics.median(seconds[first]) / median,
                "forwards": forwards[side],
                "same_tokens": sum(same) / len(same),
                "largest_tensor_mb": largest.bytes / 1e6 if batch == 1 else None,
            }
        )
    return rows
