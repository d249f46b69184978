"""Runs DiffusionGemma: a causal encoder reads finished text, a bidirectional decoder denoises a canvas of tokens.

The encoder writes the keys of finished text into the store. The decoder reads them, sees its whole canvas, and writes
no keys. Each denoising step also gets the prediction of the previous step, as an average of embeddings
(self-conditioning). The store keeps that prediction as hidden states `[rows, slots, C]`, not as logits over 262144
tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.token_head_naive import Logits, to_logits
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.sums import sum_over
from partsong.parallel.text.cache_names import cache_name
from partsong.parallel.text.plan import TextPlan
from partsong.samplers.text.key_store import SlotKeyStore
from partsong.samplers.text.model import KeyStore, TextAdapter
from partsong.samplers.text.runner import attention_mask, check_attention, check_call, head_of, weight_flops

__all__ = ["CanvasKeyStore", "DiffusionGemmaTextModel"]

#: Tokens whose predictions are averaged at once: 64 of a vocabulary of 262144 are 64 MB in float32.
_AVERAGED_AT_ONCE = 64


class CanvasKeyStore(SlotKeyStore):
    """Holds the keys of finished text, and the last prediction for unfinished tokens.

    Attributes:
        temperature: at which the next step reads the last prediction; the published sampler sets it anew each step,
            to the temperature that step's tokens were drawn at. 1.0 is the model's own distribution; `[rows]` gives
            each row its own.
        positions: int64 `[rows, slots + 1]`.
        hidden: `[rows, slots + 1, C]`, None before the first denoising step.
        predicted: bool `[rows, slots + 1]`, where `hidden` is from the previous step.
    """

    def __init__(self, *, layers: int, rows: int, slots: int, device: torch.device) -> None:
        super().__init__(layers=layers, rows=rows, slots=slots)
        self.temperature: float | Tensor = 1.0
        self.positions = torch.zeros(rows, slots + 1, dtype=torch.int64, device=device)
        self.predicted = torch.zeros(rows, slots + 1, dtype=torch.bool, device=device)
        self.hidden: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these."""
        super().keep(rows)
        self.positions, self.predicted = self.positions[rows], self.predicted[rows]
        if isinstance(self.temperature, Tensor):
            self.temperature = self.temperature[rows]
        self.hidden = None if self.hidden is None else self.hidden[rows]

    def note(self, index: Tensor, slots: Tensor, hidden: Tensor | None) -> None:
        """Stores a prediction for these slots, or (None) that they are finished."""
        self.predicted[index[:, None], slots] = hidden is not None
        # The scratch slot, which several tokens share, belongs to none of them.
        self.predicted[:, self.slots] = False
        if hidden is not None:
            if self.hidden is None:
                self.hidden = hidden.new_zeros(self.rows, self.slots + 1, hidden.shape[-1])
            self.hidden[index[:, None], slots] = hidden


class DiffusionGemmaTextModel:
    """Shows transformers' `DiffusionGemmaForBlockDiffusion` to the decoding loop.

    Finished text, the prompt first, comes with ``clean=True`` and fills the store; all tokens of a canvas come together
    in each denoising call. Images are not supported.

    Args:
        module: the model, in eval mode, used as it is.
        adapter: the row "diffusion-gemma".
        eos_token_ids: tokens that end a text.

    Raises:
        UnsupportedError: another model, an encoder that is not causal, or an attention that takes no masks.
        ArgumentError: a module in training mode.

    >>> from partsong.samplers.text.families import ADAPTERS
    >>> ADAPTERS["diffusion-gemma"].noise
    'uniform'
    """

    def __init__(self, module: PreTrainedModel, adapter: TextAdapter, *, eos_token_ids: tuple[int, ...] = ()) -> None:
        if module.config.model_type != "diffusion_gemma" or module.get_output_embeddings() is None:
            raise UnsupportedError(f"adapter {adapter.name!r} runs DiffusionGemma, found {type(module).__name__}")
        if module.training:
            raise ArgumentError(f"{type(module).__name__} is in training mode: call .eval()")
        self.config = module.config.get_text_config()
        if self.config.use_bidirectional_attention == "all":
            raise UnsupportedError("this DiffusionGemma's encoder is not causal (use_bidirectional_attention = 'all')")
        check_attention(module)
        self.module, self.adapter = module, adapter
        self.encoder: Any = module.get_submodule("model.encoder.language_model")
        self.decoder: Any = module.get_submodule("model.decoder")
        self.head = head_of(module)
        self.plan: TextPlan | None = None  # how it is shared out over ranks
        self.mask_token_id: int | None = None
        self.vocab_size = self.head.vocab_size
        self.max_positions: int | None = self.config.max_position_embeddings
        self.device = self.head.weight.device
        self.eos_token_ids = tuple(eos_token_ids)
        # Averaging the embeddings takes every token through the vocabulary twice.
        self._flops = weight_flops(self.encoder) + 4.0 * self.head.weight.numel()

    def key_store(self, rows: int, slots: int) -> CanvasKeyStore:
        """Allocates a store for the finished text and the canvas of `rows` rows of `slots` positions."""
        return CanvasKeyStore(layers=self.config.num_hidden_layers, rows=rows, slots=slots, device=self.device)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        keys: KeyStore | None,
        rows: Tensor | None = None,
        *,
        clean: bool = False,
    ) -> Tensor:
        """Returns last hidden states `[B, Q, C]`: the encoder's for finished text (`clean`), else the decoder's."""
        if not isinstance(keys, CanvasKeyStore):
            raise UnsupportedError(
                f"{self.adapter.name} reads finished text through a store from key_store() and cannot do without; "
                f"found {type(keys).__name__}"
            )
        check_call(tokens, positions, slots, visible, keys)
        index = torch.arange(keys.rows, device=slots.device) if rows is None else rows
        keys.positions[index[:, None], slots] = positions
        if clean:
            keys.at(slots, rows)
            keys.note(index, slots, None)
            return self._encode(tokens, positions, visible, keys, index)
        hidden = self._denoise(tokens, positions, slots, visible, keys, rows)
        keys.note(index, slots, hidden)
        return hidden

    def _mask(self, visible: Tensor) -> Tensor:
        return attention_mask(visible, str(self.config._attn_implementation), self.head.weight.dtype)

    def _encode(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, keys: CanvasKeyStore, index: Tensor
    ) -> Tensor:
        """Encodes finished text causally, even where the loop allows more."""
        distance = positions[:, :, None] - keys.positions[index, None, : keys.slots]
        seen = visible & (distance >= 0)
        masks = {
            "full_attention": self._mask(seen),
            "sliding_attention": self._mask(seen & (distance < self.config.sliding_window)),
        }
        call = {"input_ids": tokens, "attention_mask": masks, "position_ids": positions}
        return self.encoder(**call, **{cache_name(self.encoder): keys}).last_hidden_state

    def _denoise(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        keys: CanvasKeyStore,
        rows: Tensor | None,
    ) -> Tensor:
        decoder = self.decoder
        index = torch.arange(keys.rows, device=slots.device) if rows is None else rows
        embedded = decoder.embed_tokens(tokens)
        hidden = decoder.self_conditioning(embedded, self._expected_embedding(keys, index, slots, embedded))
        masks = self._canvas_masks(positions, slots, visible, keys, index)
        rotary = {kind: decoder.rotary_emb(hidden, positions, kind) for kind in masks}
        prefix = self._prefix(keys, rows)
        for layer, kind in zip(decoder.layers, self.config.layer_types, strict=True):
            hidden = layer(
                hidden,
                position_embeddings=rotary[kind],
                attention_mask=masks[kind],
                position_ids=positions,
                **{cache_name(layer): prefix},
            )
        return decoder.norm(hidden)

    def _canvas_masks(
        self, positions: Tensor, slots: Tensor, visible: Tensor, keys: CanvasKeyStore, index: Tensor
    ) -> dict[str, Tensor]:
        """Masks the store's slots, followed by the canvas' own tokens, whose keys the store does not hold."""
        batch, queries, count = visible.shape
        own = torch.zeros(batch, count + 1, dtype=torch.bool, device=visible.device).scatter_(1, slots, True)
        text = visible & ~own[:, None, :count]
        padded = torch.cat([visible, visible.new_zeros(batch, queries, 1)], 2)
        canvas = padded.gather(2, slots[:, None].expand(batch, queries, queries))
        # Local layers see as much of the text as the first token of the canvas would: the whole canvas sees the same.
        begin = positions.masked_fill(slots == count, torch.iinfo(positions.dtype).max).amin(1)
        near = begin[:, None] - keys.positions[index, :count] < self.config.sliding_window
        return {
            "full_attention": self._mask(torch.cat([text, canvas], 2)),
            "sliding_attention": self._mask(torch.cat([text & near[:, None], canvas], 2)),
        }

    def _prefix(self, keys: CanvasKeyStore, rows: Tensor | None) -> SimpleNamespace:
        """Returns each layer's keys and values of these rows, in the form of a cache for the decoder."""
        layers = []
        for held, layer in zip(keys.layers, self.decoder.layers, strict=True):
            if not held.is_initialized:
                attention = layer.self_attn
                heads = attention.k_proj.out_features // attention.head_dim
                empty = self.head.weight.new_zeros(1, heads, 0, attention.head_dim)
                held.lazy_initialization(empty, empty)
            seen_keys, seen_values = held.read(rows)
            layers.append(SimpleNamespace(keys=seen_keys, values=seen_values))
        return SimpleNamespace(layers=layers, is_compileable=False)

    def _expected_embedding(self, keys: CanvasKeyStore, index: Tensor, slots: Tensor, like: Tensor) -> Tensor:
        """Returns the embedding expected under the last prediction, `[B, Q, C]`; zeros without a prediction."""
        expected = torch.zeros_like(like)
        if keys.hidden is None:
            return expected
        heat = torch.as_tensor(keys.temperature, dtype=torch.float32, device=like.device).expand(keys.rows)
        if not ((heat > 0.0) & heat.isfinite()).all():
            raise ArgumentError(f"the store's temperature={keys.temperature!r}; use a finite number above 0")
        known = keys.predicted[index[:, None], slots]
        hidden = keys.hidden[index[:, None], slots].flatten(0, 1)
        embedding = self.decoder.embed_tokens
        heats = heat[index, None].expand_as(slots).reshape(-1, 1)
        tiles = zip(hidden.split(_AVERAGED_AT_ONCE), heats.split(_AVERAGED_AT_ONCE), strict=True)
        parts = [self._average(*tile) for tile in tiles]
        average = torch.cat(parts).view_as(like) * embedding.embed_scale.to(like.dtype)
        return torch.where(known[..., None], average, expected)

    def _average(self, hidden: Tensor, heat: Tensor) -> Tensor:
        logits = to_logits((hidden @ self.head.weight.T).float(), Logits(softcap=self.head.softcap), slice(None))
        logits, shard, weight = logits / heat, self.head.shard, self.decoder.embed_tokens.weight
        if shard is None:
            return torch.softmax(logits, dim=-1).to(weight.dtype) @ weight
        totals = gather_tokens(shard.axis, logits.logsumexp(-1)[None], [1] * shard.axis.size, 0, name="sums of logits")
        part = torch.exp(logits - totals.logsumexp(0)[:, None]).to(weight.dtype) @ weight
        return sum_over(shard.axis, part, name="expected embeddings")

    def flops(self, queries: int, keys: int) -> float:
        """Counts operations, two per multiply-add, of `queries` tokens that see `keys` keys each, without the head."""
        pairs = sum(layer.self_attn.q_proj.out_features for layer in self.decoder.layers)
        return queries * (self._flops + 4.0 * pairs * keys)
