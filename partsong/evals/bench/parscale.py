"""Times streams against wider models of the same predicted quality, in turn in one process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs, type_hints
from partsong.parallel.text.cache_names import cache_name
from partsong.reasoning.parscale.cost import LAWS, Shape
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import StreamWeights

__all__ = ["bench_parscale_model", "run"]

_HEAD, _VOCABULARY, _PREFIX = 32, 8192, 48


def bench_parscale_model(heads: int = 16, layers: int = 8) -> LlamaForCausalLM:
    """Builds a random Llama of `heads` times 32 channels, by default with about 25 million parameters inside.

    Args:
        heads: query heads; there are half as many key heads, or as many if the number is odd.
        layers: how many.
    """
    torch.manual_seed(0)
    width = _HEAD * heads
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=_HEAD,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@dataclass(frozen=True, slots=True)
class _Side:
    """Describes a model to time: the base, the base with streams, or a wider one."""

    name: str
    num_streams: int
    model: LlamaForCausalLM
    attached: ParScale | None

    def cache(self) -> Any:
        """Makes an empty cache for the model."""
        return DynamicCache() if self.attached is None else self.attached.cache(self.num_streams)


def run(
    *,
    repeats: Count = 5,
    streams: Sequence[int] = (1, 2, 4, 8),
    batch: Count = 1,
    prompt: Count = 256,
    new_tokens: Count = 16,
    law: str = "stack-v2-python",
    heads: int = 16,
    layers: int = 8,
) -> list[dict[str, Any]]:
    """Times prefill and decoding.

    Args:
        repeats: rounds; the median counts.
        streams: values of P; each is timed beside a model of one stream that is wider by the law.
        batch: texts at once.
        prompt: tokens of each text.
        new_tokens: steps to time in each round.
        law: name of `partsong.reasoning.parscale.cost.LAWS`; the laws were fitted to far larger models.
        heads: of the base model.
        layers: of all models.

    Returns:
        A row per side: ``name size side seconds_median seconds_all ratio_to_serial prefill_seconds parameters
        memory_bytes memory_added token_added prefill_added drift``. ``seconds_median`` is of one step, and
        ``ratio_to_serial`` is that of the base model divided by it. Memory is that of weights, keys and values.
        ``drift`` is the largest difference of logits between the steps and one forward over all tokens.

    Raises:
        ArgumentError: a number is out of range, or the law is unknown.
    """
    if law not in LAWS:
        raise ArgumentError(f"no law {law!r}; there are {', '.join(LAWS)}")
    counts = {"repeats": repeats, "batch": batch, "prompt": prompt, "new_tokens": new_tokens}
    check_knobs(type_hints(run), counts)
    if min(streams, default=0) < 1:
        raise ArgumentError(f"streams={tuple(streams)}; use one or more positive integers")
    sides = _sides(streams, heads, layers, LAWS[law].gain)
    ids = torch.randint(_VOCABULARY, (batch, prompt + new_tokens), generator=torch.Generator().manual_seed(1))
    seconds: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for _ in range(repeats):
        for side in sides:
            seconds[side.name].append(_timed(side, ids, prompt)[0])
    rows = [_row(side, ids, prompt, seconds[side.name]) for side in sides]
    base = rows[0]
    for row in rows:
        row["ratio_to_serial"] = base["seconds_median"] / row["seconds_median"]
        row["memory_added"] = row["memory_bytes"] / base["memory_bytes"] - 1
        row["token_added"] = row["seconds_median"] / base["seconds_median"] - 1
        row["prefill_added"] = row["prefill_seconds"] / base["prefill_seconds"] - 1
    return rows


def _sides(streams: Sequence[int], heads: int, layers: int, gain: float) -> list[_Side]:
    # The base is a separate model, because it is timed without the hooks that look for streams.
    sides, shared = [_Side("base", 1, bench_parscale_model(heads, layers), None)], bench_parscale_model(heads, layers)
    several = sorted(set(streams) - {1})
    attached = ParScale(shared, *(StreamWeights.new(shared, num, prefix_length=_PREFIX) for num in several))
    for num in streams:
        sides.append(_Side(f"streams {num}", num, shared, attached))
        if num > 1:
            wide = 2 * round(heads * math.sqrt(gain * math.log(num) + 1.0) / 2)
            sides.append(_Side(f"parameters {num}", num, bench_parscale_model(wide, layers), None))
    return sides


@torch.inference_mode()
def _timed(side: _Side, ids: Tensor, prompt: int) -> tuple[tuple[float, float], Tensor, Any]:
    """Returns the seconds of the prefill and of a step, the logits of the steps, and the cache."""
    cache, logits = side.cache(), []
    keys = {cache_name(side.model): cache}
    start = time.perf_counter()
    side.model(ids[:, :prompt], **keys, logits_to_keep=1)
    middle = time.perf_counter()
    for place in range(prompt, ids.shape[1]):
        logits.append(side.model(ids[:, place : place + 1], **keys).logits)
    end = time.perf_counter()
    return (middle - start, (end - middle) / len(logits)), torch.cat(logits, dim=1), cache


@torch.inference_mode()
def _row(side: _Side, ids: Tensor, prompt: int, seconds: list[tuple[float, float]]) -> dict[str, Any]:
    _, logits, cache = _timed(side, ids, prompt)
    whole: Tensor = side.model(ids, **{cache_name(side.model): side.cache()}).logits[:, prompt:]
    kept = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    learned = list(side.model.parameters())
    if side.attached is not None and side.num_streams > 1:
        learned += side.attached.weights[side.num_streams].parameters()
    steps = [step for _, step in seconds]
    return {
        "name": side.name,
        "size": side.num_streams,
        "side": side.name.split()[0],
        "seconds_median": statistics.median(steps),
        "seconds_all": steps,
        "prefill_seconds": statistics.median(first for first, _ in seconds),
        "parameters": sum(each.numel() for each in learned),
        "parameters_inside": round(Shape.of(side.model.config).parameters),
        "memory_bytes": sum(each.numel() * each.element_size() for each in (*kept, *learned)),
        "drift": float((logits - whole).abs().max()),
    }
