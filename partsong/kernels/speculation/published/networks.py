"""Computes what published drafters predict from a model's states: token after token, or a block at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from partsong.errors import UnsupportedError
from partsong.kernels.speculation.published.checkpoint import DraftCheckpoint
from partsong.kernels.speculation.published.layers import DraftKeys, DraftLayer, DraftRotary, rms_norm

__all__ = ["BlockNetwork", "DraftTarget", "DraftedText", "EagleNetwork", "network_of"]


class DraftTarget(Protocol):
    """Is what a published drafter asks of the model that it drafts for.

    Attributes:
        layers: how many it has.
        hidden_size: of its states.
        vocab_size: how many tokens it knows.
        dtype: of its weights.
        device: where they are.
    """

    layers: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Returns the embeddings of tokens, `[tokens, hidden size]`."""
        ...

    def read(self, states: Tensor) -> Tensor:
        """Computes logits from states with the head, `[..., hidden size]` to `[..., vocabulary]`."""
        ...


@dataclass(slots=True)
class DraftedText:
    """Holds what a drafter knows of a text.

    Attributes:
        first: position of the first token whose states it has.
        states: those that are not taken in yet, each `[tokens, layers, hidden size]`.
        kept: keys of each layer.
    """

    first: int
    kept: tuple[DraftKeys, ...]
    states: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Returns the position after the last token whose states were taken in."""
        return self.first + self.kept[0].end


class _Network:
    """Holds what both kinds of drafters have."""

    def __init__(self, read: DraftCheckpoint, model: DraftTarget) -> None:
        self._weights, self._model, self._tokens = read.weights, model, read.tokens
        self.layers = [DraftLayer(read.weights, number, read.settings) for number in range(read.num_layers)]
        self._eps = self.layers[0].eps
        self._rotary = DraftRotary(read.settings, model.device)
        cap = read.settings.get("final_logit_softcapping")
        self._multiplier, self._cap = float(read.settings.get("output_multiplier", 1.0)), float(cap) if cap else None

    def open(self, first: int) -> DraftedText:
        """Begins with a text."""
        return DraftedText(first, tuple(DraftKeys() for _ in self.layers))

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Returns the drafter's own embeddings of tokens, or the model's."""
        table = self._weights.get("embed_tokens.weight")
        if table is None:
            return self._model.embed(tokens)
        return F.embedding(torch.tensor(tokens, device=table.device), table)

    def logits(self, states: Tensor) -> Tensor:
        """Computes logits of the drafter's tokens, `[..., draft vocabulary]`."""
        head = self._weights.get("lm_head.weight")
        states = rms_norm(states, self._weights["norm.weight"], self._eps)
        logits = self._model.read(states) if head is None else F.linear(states, head)
        logits = logits * self._multiplier
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    def over_model(self, logits: Tensor) -> Tensor:
        """Spreads logits `[rows, draft vocabulary]` over the model's tokens; those it never guesses get -inf."""
        if self._tokens is None:
            return logits
        whole = logits.new_full((len(logits), self._model.vocab_size), -torch.inf)
        whole[:, self._tokens] = logits
        return whole

    def _fused(self, states: Sequence[Tensor]) -> Tensor:
        """Makes one state of those of several layers."""
        return F.linear(torch.cat(tuple(states)).flatten(1).to(self._model.dtype), self._weights["fc.weight"])

    def _turns(self, texts: Sequence[DraftedText], counts: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
        places = [text.end + place for text, count in zip(texts, counts, strict=True) for place in range(count)]
        return self._rotary.at(torch.tensor(places, device=like.device), like)


class EagleNetwork(_Network):
    """Predicts a token from the state before it, and goes on from its own state (EAGLE-3, arXiv 2503.01840)."""

    def __init__(self, read: DraftCheckpoint, model: DraftTarget) -> None:
        super().__init__(read, model)
        self._normed_residual = bool(read.settings.get("norm_before_residual", False))

    def catch_up(self, texts: Sequence[DraftedText], following: Sequence[Sequence[int]]) -> Tensor:
        """Takes in the states that have come since, each with the token after it.

        Returns:
            The state `[texts, C]` after each text's last token.
        """
        counts = [sum(map(len, text.states)) for text in texts]
        states = self._fused([each for text in texts for each in text.states])
        for text in texts:
            text.states.clear()
        out = self.step(texts, [token for tokens in following for token in tokens], states, counts)
        ends = torch.tensor(counts, device=out.device).cumsum(0) - 1
        return out[ends]

    def step(
        self, texts: Sequence[DraftedText], tokens: Sequence[int], states: Tensor, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Goes on by tokens, one for each text or as many as are said, from the states before them."""
        (layer,), counts = self.layers, counts or [1] * len(texts)
        normed = layer.norm("hidden_norm", states)
        x = torch.cat([layer.norm("input_layernorm", self.embed(tokens)), normed], -1)
        kept = [text.kept[0] for text in texts]
        out = layer.attend(x, self._turns(texts, counts, x), kept, counts, causal=True)
        out = out + (normed if self._normed_residual else states)
        return out + layer.feed_forward(layer.norm("post_attention_layernorm", out))


class BlockNetwork(_Network):
    """Predicts a block of tokens at once (DFlash, arXiv 2602.06036).

    DSpark (arXiv 2607.05147) adds to the logits of a place what the token before it makes likely, and says how sure it
    is of each.
    """

    def __init__(self, read: DraftCheckpoint, model: DraftTarget) -> None:
        super().__init__(read, model)
        settings, self._is_spark = read.settings, read.kind == "dspark"
        kinds = set(settings.get("layer_types") or ()) - {"full_attention"}
        if kinds or settings.get("is_causal"):
            raise UnsupportedError(f"the drafter's layers have {', '.join(kinds) or 'causal'} attention, not full")
        if self._is_spark and str(settings.get("markov_head_type", "vanilla")) != "vanilla":
            raise UnsupportedError(f"the drafter's Markov head is {settings['markov_head_type']!r}; 'vanilla' is known")
        self.size, self._mask = int(settings.get("block_size", 16)), int(settings["mask_token_id"])
        self._scale = float(settings.get("input_embedding_scale", 1.0))

    @property
    def num_guesses(self) -> int:
        """Counts the tokens of a block: in DFlash the first place of it holds the text's last token."""
        return self.size if self._is_spark else self.size - 1

    def catch_up(self, texts: Sequence[DraftedText]) -> None:
        """Takes in the states that have come since; all layers read the same ones."""
        counts = [sum(map(len, text.states)) for text in texts]
        fused = self._fused([each for text in texts for each in text.states])
        fused = rms_norm(fused, self._weights["hidden_norm.weight"], self._eps)
        turns = self._turns(texts, counts, fused)
        for number, layer in enumerate(self.layers):
            keys, values = (each.split(counts) for each in layer.keys_of(fused, turns))
            for text, key, value in zip(texts, keys, values, strict=True):
                text.kept[number].add(key, value)
        for text in texts:
            text.states.clear()

    def block(self, texts: Sequence[DraftedText], last: Sequence[int]) -> Tensor:
        """Returns states `[texts, guesses, C]` of the places after each text's last token."""
        tokens = [token for each in last for token in (each, *[self._mask] * (self.size - 1))]
        x, counts = self.embed(tokens) * self._scale, [self.size] * len(texts)
        turns = self._turns(texts, counts, x)
        for number, layer in enumerate(self.layers):
            kept = [text.kept[number] for text in texts]
            before = [each.end for each in kept]
            x = x + layer.attend(layer.norm("input_layernorm", x), turns, kept, counts, causal=False)
            x = x + layer.feed_forward(layer.norm("post_attention_layernorm", x))
            for each, end in zip(kept, before, strict=True):
                each.end = end
        return x.unflatten(0, (len(texts), self.size))[:, self.size - self.num_guesses :]

    def after(self, logits: Tensor, last: Sequence[int]) -> Tensor:
        """Adds to the logits of a place `[texts, draft vocabulary]` what the tokens before it make likely."""
        if "markov_head.markov_w1.weight" not in self._weights:
            return logits
        return logits + F.linear(self._before(last), self._weights["markov_head.markov_w2.weight"])

    def chances(self, states: Tensor, last: Sequence[int]) -> list[float] | None:
        """Returns how likely the guesses of a place are right, if the drafter says so.

        Args:
            states: of the place, `[texts, C]`.
            last: the tokens before it.
        """
        weight = self._weights.get("confidence_head.proj.weight")
        if weight is None:
            return None
        states = rms_norm(states, self._weights["norm.weight"], self._eps)
        features = states if weight.shape[1] == states.shape[1] else torch.cat([states, self._before(last)], -1)
        return F.linear(features, weight, self._weights.get("confidence_head.proj.bias"))[:, 0].sigmoid().tolist()

    def _before(self, last: Sequence[int]) -> Tensor:
        table = self._weights["markov_head.markov_w1.weight"]
        return F.embedding(torch.tensor(last, device=table.device), table)


def network_of(read: DraftCheckpoint, model: Any) -> EagleNetwork | BlockNetwork:
    """Makes the network of a drafter."""
    return EagleNetwork(read, model) if read.kind == "eagle3" else BlockNetwork(read, model)
