"""Computes what streams are worth in parameters by the scaling law, and counts the parameters of a decoder.

The law is that of Chen et al., arXiv 2505.10475: P streams of a model of N parameters, without embeddings, reach the
loss of a model of N (k ln P + 1) parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from partsong.knobs import AboveZero, Count, check_knobs, type_hints

__all__ = ["LAWS", "Law", "Shape", "equivalent_parameters", "predicted_loss"]


@dataclass(frozen=True, slots=True)
class Law:
    """Describes the law L = E + (A 1e9 / (N (k ln P + 1)))^alpha, in nats per token.

    Attributes:
        irreducible: E.
        scale: A.
        exponent: alpha.
        gain: k, the worth of a stream.
    """

    irreducible: float
    scale: float
    exponent: float
    gain: float


#: Laws fitted to the losses that the paper publishes (0.5 to 4.4 billion parameters, P = 1 to 8): R^2 0.998 and 0.999.
#: Beyond that range, and most of all for small models, they extrapolate.
LAWS = {"stack-v2-python": Law(0.691, 0.0112, 0.189, 0.393), "pile": Law(1.289, 0.1976, 0.196, 0.334)}


def equivalent_parameters(parameters: float, num_streams: Count, law: Law) -> float:
    """Counts the parameters of the one-stream model with the same predicted loss: N (k ln P + 1).

    >>> round(equivalent_parameters(1.0, 8, LAWS["stack-v2-python"]), 2)
    1.82
    """
    check_knobs(type_hints(equivalent_parameters), {"num_streams": num_streams})
    return parameters * (law.gain * math.log(num_streams) + 1.0)


def predicted_loss(parameters: AboveZero, num_streams: Count, law: Law) -> float:
    """Predicts the loss by a law, in nats per token.

    Args:
        parameters: how many the model has, without embeddings.
        num_streams: P.
        law: one of `LAWS`.

    Raises:
        ArgumentError: there are no parameters or no streams.
    """
    check_knobs(type_hints(predicted_loss), {"parameters": parameters})
    return law.irreducible + (law.scale * 1e9 / equivalent_parameters(parameters, num_streams, law)) ** law.exponent


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds the sizes of a decoder, which may be fractions, since a model may have any number of parameters.

    Attributes:
        layers: how many layers it has.
        width: the hidden size.
        query_width: heads times their channels.
        kv_width: key heads times their channels.
        inner: the width of the feed-forward network, which has three matrices.
        vocabulary: how many tokens it has.
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
        """Reads the sizes in a transformers configuration."""
        heads = config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        sizes = config.num_hidden_layers, config.hidden_size, heads * head, kv_heads * head, config.intermediate_size
        return cls(*sizes, config.vocab_size, bool(config.tie_word_embeddings))

    @property
    def parameters(self) -> float:
        """Counts the parameters in the layers' matrices, without embeddings, norms and biases."""
        per_layer = self.width * (2 * self.query_width + 2 * self.kv_width + 3 * self.inner)
        return self.layers * per_layer

    @property
    def embeddings(self) -> float:
        """Counts the parameters of the embeddings of input and output."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    def widened(self, factor: float) -> Shape:
        """Returns sizes of the same depth with `factor` times the parameters."""
        s = math.sqrt(factor)
        more = {name: getattr(self, name) * s for name in ("width", "query_width", "kv_width", "inner")}
        return replace(self, **more)
