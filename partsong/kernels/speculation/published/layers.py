"""Computes the layers of published drafters: those of Llama and Qwen 3, over keys that each text keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from partsong.errors import UnsupportedError
from partsong.kernels.attend import attention
from partsong.kernels.masks import Causal

__all__ = ["DraftLayer", "DraftKeys", "DraftRotary", "rms_norm"]

#: Tokens that the first memory for keys holds; it doubles when it is full.
_ROOM = 64


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides by the root mean square of the last dim, in float32 at least, and multiplies by a weight."""
    working = x if x.dtype is torch.float64 else x.float()
    return weight * (working * torch.rsqrt(working.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class DraftRotary:
    """Turns queries and keys by their positions, as transformers does for the drafter's configuration.

    Args:
        settings: of the drafter.
        device: where positions are.

    Raises:
        UnsupportedError: transformers does not know the kind of positions.
    """

    def __init__(self, settings: Mapping[str, Any], device: torch.device) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta")
        known = {name: settings[name] for name in names if settings.get(name) is not None}
        # Older configurations say a base and a way to scale it, newer ones both together.
        for name in ("rope_scaling", "rope_parameters"):
            if settings.get(name):
                known[name] = dict(settings[name])
        try:
            self._embedding: Any = LlamaRotaryEmbedding(LlamaConfig(**known)).to(device)
        except (KeyError, ValueError) as error:
            raise UnsupportedError(f"the drafter's positions are not known: {error}") from error

    def at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines `[tokens, 1, head_dim]` of positions `[tokens]`."""
        cos, sin = self._embedding(like[None], positions[None])
        return cos[0, :, None], sin[0, :, None]


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-second, first], -1) * turns[1]


class DraftKeys:
    """Keeps the keys and values of one layer for one text, in memory that grows.

    Attributes:
        end: how many tokens they are of; to lower it forgets the last ones.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.end = 0

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds tokens, each `[tokens, heads, head_dim]`, and returns all, each `[1, heads, tokens, head_dim]`."""
        until = self.end + len(keys)
        if self._memory is None or self._memory.shape[2] < until:
            grown = keys.new_empty(2, keys.shape[1], max(_ROOM, 2 * until), keys.shape[2])
            if self._memory is not None:
                grown[:, :, : self.end] = self._memory[:, :, : self.end]
            self._memory = grown
        self._memory[0, :, self.end : until] = keys.transpose(0, 1)
        self._memory[1, :, self.end : until] = values.transpose(0, 1)
        self.end = until
        return self._memory[:1, :, :until], self._memory[1:, :, :until]


class DraftLayer:
    """Computes one layer of a drafter, for tokens of several texts in one row.

    Args:
        weights: of the drafter, by name.
        number: of the layer.
        settings: of the drafter.
    """

    def __init__(self, weights: Mapping[str, Tensor], number: int, settings: Mapping[str, Any]) -> None:
        begin = f"layers.{number}."
        self._weights = {name.removeprefix(begin): each for name, each in weights.items() if name.startswith(begin)}
        heads = int(settings["num_attention_heads"])
        self._heads = heads, int(settings.get("num_key_value_heads") or heads)
        width = len(self._weights["self_attn.q_proj.weight"])
        self._head_dim, self.eps = width // heads, float(settings.get("rms_norm_eps", 1e-6))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Applies one of the layer's norms."""
        return rms_norm(x, self._weights[f"{name}.weight"], self.eps)

    def keys_of(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns keys and values of tokens `[tokens, C]`, each `[tokens, heads, head_dim]`."""
        keys, values = (self._project(f"self_attn.{name}_proj", x).unflatten(1, (self._heads[1], -1)) for name in "kv")
        return _turned(self._head_norm("k", keys), turns), values

    def attend(
        self, x: Tensor, turns: tuple[Tensor, Tensor], kept: Sequence[DraftKeys], counts: Sequence[int], *, causal: bool
    ) -> Tensor:
        """Lets the tokens of each text attend to its keys, with theirs added, and returns what comes of it.

        Args:
            x: `[tokens, C]`, of one text after the other.
            turns: of their positions.
            kept: keys of each text.
            counts: how many of the tokens belong to each.
            causal: whether a token sees only those before it; the kept ones it always sees.
        """
        queries = self._project("self_attn.q_proj", x).unflatten(1, (self._heads[0], self._head_dim))
        queries = _turned(self._head_norm("q", queries), turns)
        keys, values = self.keys_of(x, turns)
        out, begin = [], 0
        for text, count in zip(kept, counts, strict=True):
            here, before = slice(begin, begin + count), text.end
            known = text.add(keys[here], values[here])
            mask = Causal(before) if causal else None
            read, _ = attention(queries[here].transpose(0, 1)[None], *known, mask=mask)
            out.append(read[0].transpose(0, 1).flatten(1))
            begin += count
        return self._project("self_attn.o_proj", torch.cat(out))

    def feed_forward(self, x: Tensor) -> Tensor:
        """Applies the gated feed-forward layer."""
        return self._project(
            "mlp.down_proj", F.silu(self._project("mlp.gate_proj", x)) * self._project("mlp.up_proj", x)
        )

    def _project(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _head_norm(self, letter: str, x: Tensor) -> Tensor:
        """Norms each head, in the layouts that do so."""
        weight = self._weights.get(f"self_attn.{letter}_norm.weight")
        return x if weight is None else rms_norm(x, weight, self.eps)
