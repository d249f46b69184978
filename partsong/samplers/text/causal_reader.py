"""Runs a causal model on texts that grow at their end: first the prompts, then each new token.

All rows end at the same slot of the key store, so shorter ones begin further right. As long as every row gets one token
per step, all keys are written at one place, and only rows of different lengths need a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.few_rows import with_few_rows
from partsong.parallel.ranks.later import on_device
from partsong.parallel.text.cache_names import cache_name
from partsong.samplers.text.growing_keys import GrowingKeys
from partsong.samplers.text.runner import StockTextModel, attention_mask

__all__ = ["CausalReader"]


class CausalReader:
    """Computes the hidden states that the next tokens of texts are read from.

    Args:
        model: a causal model.
        texts: tokens of each row, at least one.
        room: how many tokens may follow the longest of them.
        layers: whose states are kept until the next forward: 0 is the embedding, n the output of the n-th layer.

    Attributes:
        states: those of the last forward, `[B, Q, layers, C]`; None where no layer was named.
    """

    def __init__(
        self, model: StockTextModel, texts: Sequence[Sequence[int]], room: int, *, layers: tuple[int, ...] = ()
    ) -> None:
        self.model, self.texts, self._layers = model, texts, layers
        self.states: Tensor | None = None
        self.end = max(map(len, texts))
        self.pads = [self.end - len(text) for text in texts]
        self.keys = GrowingKeys(layers=model.module.config.num_hidden_layers, room=self.end + room)
        self._base = with_few_rows(model.base)
        self._pads = torch.tensor(self.pads, device=model.device)

    def begin(self) -> Tensor:
        """Returns the hidden states `[B, C]` after the texts as they were given."""
        # A text's own token, since one that the model breaks on would spoil the text even unseen.
        padded = [[text[0]] * pad + list(text) for pad, text in zip(self.pads, self.texts, strict=True)]
        places = torch.arange(self.end, device=self.model.device)
        visible = None
        if any(self.pads):
            visible = (places >= self._pads[:, None])[:, None] & (places <= places[:, None])
        self.keys.at(0, self.end)
        return self._forward(padded, (places - self._pads[:, None]).clamp(min=0), visible)[:, -1]

    def go_on(self, tokens: Sequence[int]) -> Tensor:
        """Feeds one more token of every row; returns the hidden states `[B, C]` after them."""
        self.keys.at(self.end, self.end + 1)
        visible = None
        if any(self.pads):
            places = torch.arange(self.end + 1, device=self.model.device)
            visible = (places >= self._pads[:, None])[:, None]
        hidden = self._forward([[token] for token in tokens], (self.end - self._pads)[:, None], visible)[:, -1]
        self.end += 1
        return hidden

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all rows but these."""
        index = torch.tensor(rows, device=self.model.device)
        self.keys.keep(index)
        self.pads = [self.pads[row] for row in rows]
        self._pads = self._pads[index]

    def _forward(self, tokens: list[list[int]], positions: Tensor, visible: Tensor | None) -> Tensor:
        module = self.model.module
        call: dict[str, Any] = {"position_ids": positions, cache_name(self._base): self.keys, "use_cache": True}
        if visible is not None:
            attention = str(module.config._attn_implementation)
            call["attention_mask"] = attention_mask(visible, attention, self.model.head.weight.dtype)
        ids = on_device(tokens, self.model.device)
        if not self._layers:
            return self._base(input_ids=ids, **call, return_dict=True).last_hidden_state
        out = self._base(input_ids=ids, **call, return_dict=True, output_hidden_states=True)
        self.states = torch.stack([out.hidden_states[layer] for layer in self._layers], dim=2)
        return out.last_hidden_state
