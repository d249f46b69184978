"""Computes the cost of streams, and of the same quality in parameters, by the scaling law and a roofline.

Both sides are priced alike. Memory is weights, keys and values. Time is the larger of arithmetic and memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.parscale.cost import LAWS, Law, Shape, equivalent_parameters, predicted_loss

__all__ = ["HARDWARE", "Hardware", "cost_table", "stream_parameters"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes a device.

    Attributes:
        flops_per_second: the speed of dense matrix products in the weights' type.
        bytes_per_second: the speed of its memory.
    """

    flops_per_second: float
    bytes_per_second: float


#: Devices as in their makers' data sheets, with dense 16-bit products.
HARDWARE = {
    "a100-80gb": Hardware(312e12, 2.04e12),
    "h100-sxm": Hardware(989e12, 3.35e12),
    "h200": Hardware(989e12, 4.8e12),
    "rtx-4090": Hardware(165e12, 1.01e12),
}


def stream_parameters(shape: Shape, num_streams: int, prefix_length: int) -> float:
    """Counts the parameters that streams add: prefixes and the aggregator; one stream adds none."""
    if num_streams == 1:
        return 0.0
    prefixes = 2 * shape.layers * num_streams * prefix_length * shape.kv_width
    return prefixes + (num_streams * shape.width + 1) * shape.width + (shape.width + 1) * num_streams


@dataclass(frozen=True, slots=True)
class _Price:
    memory: float
    prefill: float
    token: float


def cost_table(
    config: Any,
    *,
    streams: Sequence[int] = (1, 2, 4, 8),
    batch: Count = 1,
    prompt: Count = 1024,
    new_tokens: Count = 1024,
    hardware: Hardware = HARDWARE["h100-sxm"],
    law: Law = LAWS["stack-v2-python"],
    bytes_per_number: Count = 2,
    prefix_length: Count = 48,
) -> list[dict[str, Any]]:
    """Compares memory and time of P streams with those of a wider model of the same predicted loss.

    Args:
        config: a transformers configuration, or a `Shape`.
        streams: values of P.
        batch: how many texts there are at once.
        prompt: how many tokens each prompt has.
        new_tokens: how many tokens each answer has. Memory is that at the end, the time of a token that half way.
        hardware: the device.
        law: says how many parameters are as good as streams.
        bytes_per_number: the size of a weight, and of a number in keys and values.
        prefix_length: how many learned keys a stream has.

    Returns:
        Two rows per P, with `side` "streams" and "parameters": ``name size side parameters memory_bytes prefill_seconds
        token_seconds memory_added token_added predicted_loss``. The columns `*_added` say how much more than one stream
        it is (0.1: a tenth more).

    Raises:
        ArgumentError: a number is out of bounds, or there are no streams.

    >>> from transformers import Qwen2Config
    >>> rows = cost_table(Qwen2Config(hidden_size=2048, num_hidden_layers=24), streams=(1, 8))
    >>> [(row["side"], row["size"]) for row in rows]
    [('streams', 1), ('parameters', 1), ('streams', 8), ('parameters', 8)]
    """
    sizes = {"batch": batch, "prompt": prompt, "new_tokens": new_tokens}
    sizes |= {"bytes_per_number": bytes_per_number, "prefix_length": prefix_length}
    check_knobs(type_hints(cost_table), sizes)
    if not streams:
        raise ArgumentError("streams is empty; give at least one number of streams")
    shape = config if isinstance(config, Shape) else Shape.of(config)

    def price(one: Shape, num: int) -> _Price:
        return _price(one, num, batch, (prompt, new_tokens), hardware, bytes_per_number, prefix_length)

    base, rows = price(shape, 1), []
    for num in streams:
        wide = shape.widened(equivalent_parameters(1.0, num, law))
        loss = predicted_loss(shape.parameters, num, law)
        for side, one, count in (("streams", shape, num), ("parameters", wide, 1)):
            cost = price(one, count)
            row = {"name": f"{side} {num}", "size": num, "side": side, "predicted_loss": loss}
            row["parameters"] = one.parameters + one.embeddings + stream_parameters(one, count, prefix_length)
            row |= {"memory_bytes": cost.memory, "prefill_seconds": cost.prefill, "token_seconds": cost.token}
            row |= {"memory_added": cost.memory / base.memory - 1, "token_added": cost.token / base.token - 1}
            rows.append(row)
    return rows


def _price(
    shape: Shape, num: int, batch: int, tokens: tuple[int, int], where: Hardware, size: int, prefix: int
) -> _Price:
    """Computes the memory at the end, the time of a prefill of all prompts, and of one step of all texts half way."""
    prompt, new = tokens
    in_front = prefix if num > 1 else 0
    rows = batch * num
    weights = (shape.parameters + shape.embeddings + stream_parameters(shape, num, prefix)) * size
    per_key = 2 * shape.layers * shape.kv_width * size
    memory = weights + per_key * rows * (in_front + prompt + new)
    # The streams meet before the output layer, which runs once. A step reads only the embeddings of its tokens.
    read = weights - (0 if shape.tied else shape.vocabulary * shape.width * size)
    head = 2 * batch * (shape.vocabulary * shape.width + stream_parameters(shape, num, 0))

    def seconds(queries: float, keys: float) -> float:
        flops = rows * queries * (2 * shape.parameters + 4 * shape.layers * shape.query_width * keys) + head
        moved = read + per_key * rows * (keys + queries)
        return max(flops / where.flops_per_second, moved / where.bytes_per_second)

    return _Price(memory, seconds(prompt, in_front + prompt / 2), seconds(1, in_front + prompt + new / 2))
