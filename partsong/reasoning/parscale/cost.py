"""What streams cost, and what as much quality costs in parameters: the scaling law and a roofline.

The law is that of Chen et al., arXiv 2505.10475: P streams of a model of N parameters, embeddings not counted, reach
the loss of one of N (k ln P + 1). Both sides are then priced alike: memory is weights and keys and values, time is the
larger of arithmetic and memory traffic. Importing this loads torch, because its package does; it computes with numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from partsong.errors import ArgumentError

__all__ = ["HARDWARE", "LAWS", "Hardware", "Law", "Shape", "cost_table", "equivalent_parameters", "predicted_loss"]


@dataclass(frozen=True, slots=True)
class Law:
    """L = E + (A 1e9 / (N (k ln P + 1)))^alpha, in nats per token.

    Attributes:
        irreducible: E.
        scale: A.
        exponent: alpha.
        gain: k, what a stream is worth.
    """

    irreducible: float
    scale: float
    exponent: float
    gain: float


#: Fitted to the losses the paper publishes (0.5 to 4.4 billion parameters, P = 1 to 8): R^2 0.998 and 0.999. Beyond
#: that range, and for small models above all, they are extrapolated.
LAWS = {
    "stack-v2-python": Law(0.691, 0.0112, 0.189, 0.393),
    "pile": Law(1.289, 0.1976, 0.196, 0.334),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device.

    Attributes:
        flops_per_second: of dense matrix products in the weights' type.
        bytes_per_second: of its memory.
    """

    flops_per_second: float
    bytes_per_second: float


#: From the makers' data sheets, dense 16-bit products.
HARDWARE = {
    "a100-80gb": Hardware(312e12, 2.04e12),
    "h100-sxm": Hardware(989e12, 3.35e12),
    "h200": Hardware(989e12, 4.8e12),
    "rtx-4090": Hardware(165e12, 1.01e12),
}


def equivalent_parameters(parameters: float, num_streams: int, law: Law) -> float:
    """Parameters of the model of one stream with the same predicted loss: N (k ln P + 1).

    >>> round(equivalent_parameters(1.0, 8, LAWS["stack-v2-python"]), 2)
    1.82
    """
    return parameters * (law.gain * math.log(_streams(num_streams)) + 1.0)


def predicted_loss(parameters: float, num_streams: int, law: Law) -> float:
    """The law's loss, in nats per token.

    Args:
        parameters: embeddings not counted.
        num_streams: P.
        law: one of `LAWS`.

    Raises:
        ArgumentError: no parameters or no streams.
    """
    if parameters <= 0:
        raise ArgumentError(f"a model has more than 0 parameters, found {parameters}")
    return law.irreducible + (law.scale * 1e9 / equivalent_parameters(parameters, num_streams, law)) ** law.exponent


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; fractions are allowed, since a model of any number of parameters is to be priced.

    Attributes:
        layers: how many.
        width: hidden size.
        query_width: heads times their channels.
        kv_width: key heads times their channels.
        inner: width of the feed-forward network, of three matrices.
        vocabulary: tokens.
        tied: whether the output layer is the embedding.
    """

    layers: float
    width: float
    query_width: float
    kv_width: float
    inner: float
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> Shape:
        """The sizes in a transformers configuration."""
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        sizes = config.num_hidden_layers, config.hidden_size, heads * head, kv_heads * head, config.intermediate_size
        return cls(*sizes, config.vocab_size, bool(config.tie_word_embeddings))

    @property
    def parameters(self) -> float:
        """Matrices of the layers; embeddings, norms and biases are not counted."""
        per_layer = self.width * (2 * self.query_width + 2 * self.kv_width + 3 * self.inner)
        return self.layers * per_layer

    @property
    def embeddings(self) -> float:
        """Of input and output."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    def widened(self, factor: float) -> Shape:
        """The same depth with `factor` times the parameters."""
        s = math.sqrt(factor)
        more = {name: getattr(self, name) * s for name in ("width", "query_width", "kv_width", "inner")}
        return replace(self, **more)

    def stream_parameters(self, num_streams: int, prefix_length: int) -> float:
        """What streams add: prefixes and the aggregator; nothing for one."""
        if num_streams == 1:
            return 0.0
        prefixes = 2 * self.layers * num_streams * prefix_length * self.kv_width
        return prefixes + (num_streams * self.width + 1) * self.width + (self.width + 1) * num_streams


@dataclass(frozen=True, slots=True)
class _Price:
    memory: float
    prefill: float
    token: float


def cost_table(
    config: Any,
    *,
    streams: Sequence[int] = (1, 2, 4, 8),
    batch: int = 1,
    prompt: int = 1024,
    new_tokens: int = 1024,
    hardware: Hardware = HARDWARE["h100-sxm"],
    law: Law = LAWS["stack-v2-python"],
    bytes_per_number: int = 2,
    prefix_length: int = 48,
) -> list[dict[str, Any]]:
    """Memory and time of P streams beside those of a wider model of the same predicted loss.

    Args:
        config: a transformers configuration, or a `Shape`.
        streams: values of P, the first of them the base that others are compared with.
        batch: texts at once.
        prompt: tokens of each prompt.
        new_tokens: tokens written to each; memory is that at the end, the time of a token that half way.
        hardware: where.
        law: which parameters are as good as streams.
        bytes_per_number: of weights, keys and values.
        prefix_length: learned keys of a stream.

    Returns:
        Two rows per P, `side` "streams" and "parameters": ``name size side parameters memory_bytes prefill_seconds
        token_seconds memory_added token_added predicted_loss``, of which `*_added` are over one stream (0.1: a tenth
        more).

    Raises:
        ArgumentError: a number that cannot be.

    >>> from transformers import Qwen2Config
    >>> rows = cost_table(Qwen2Config(hidden_size=2048, num_hidden_layers=24), streams=(1, 8))
    >>> [(row["side"], row["size"]) for row in rows]
    [('streams', 1), ('parameters', 1), ('streams', 8), ('parameters', 8)]
    """
    if min(batch, prompt, new_tokens, bytes_per_number, prefix_length) < 1 or not streams:
        raise ArgumentError("batch, prompt, new_tokens, bytes_per_number and prefix_length are 1 or more")
    shape = config if isinstance(config, Shape) else Shape.of(config)

    def price(one: Shape, num: int) -> _Price:
        return _price(one, num, batch, (prompt, new_tokens), hardware, bytes_per_number, prefix_length)

    base, rows = price(shape, 1), []
    for num in streams:
        wide = shape.widened(equivalent_parameters(1.0, num, law))
        loss = predicted_loss(shape.parameters, num, law)
        for side, one, count in (("streams", shape, num), ("parameters", wide, 1)):
            found = price(one, count)
            row = {"name": f"{side} {num}", "size": num, "side": side, "predicted_loss": loss}
            row["parameters"] = one.parameters + one.embeddings + one.stream_parameters(count, prefix_length)
            row |= {"memory_bytes": found.memory, "prefill_seconds": found.prefill, "token_seconds": found.token}
            row |= {"memory_added": found.memory / base.memory - 1, "token_added": found.token / base.token - 1}
            rows.append(row)
    return rows


def _price(
    shape: Shape, num: int, batch: int, tokens: tuple[int, int], where: Hardware, size: int, prefix: int
) -> _Price:
    """Memory at the end, a prefill of all prompts, and one step of all texts half way."""
    prompt, new = tokens
    in_front = prefix if num > 1 else 0
    rows = batch * num
    weights = (shape.parameters + shape.embeddings + shape.stream_parameters(num, prefix)) * size
    per_key = 2 * shape.layers * shape.kv_width * size
    memory = weights + per_key * rows * (in_front + prompt + new)
    # The streams meet before the output layer, which runs once; a step reads the embedding of its tokens only.
    read = weights - (0 if shape.tied else shape.vocabulary * shape.width * size)
    head = 2 * batch * (shape.vocabulary * shape.width + shape.stream_parameters(num, 0))

    def seconds(queries: float, keys: float) -> float:
        flops = rows * queries * (2 * shape.parameters + 4 * shape.layers * shape.query_width * keys) + head
        moved = read + per_key * rows * (keys + queries)
        return max(flops / where.flops_per_second, moved / where.bytes_per_second)

    return _Price(memory, seconds(prompt, in_front + prompt / 2), seconds(1, in_front + prompt + new / 2))


def _streams(num: int) -> int:
    if num < 1:
        raise ArgumentError(f"a model has 1 stream or more, found {num}")
    return num
