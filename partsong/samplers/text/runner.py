"""Runs a stock transformers model as a `TextModel`: its own modules, with our masks, positions and key store.

The language-model head is never run: the loop needs it at a few positions only and has a kernel for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.key_reuse import why_keys_cannot_be_kept
from partsong.parallel.text.cache_names import cache_name
from partsong.parallel.text.plan import TextPlan
from partsong.parallel.text.shard import shard_of
from partsong.samplers.text.families import DECODERS
from partsong.samplers.text.heads import head_logits
from partsong.samplers.text.key_store import SlotKeyStore
from partsong.samplers.text.model import Head, KeyStore, TextAdapter

__all__ = ["StockTextModel", "attention_mask", "head_of", "weight_flops"]

#: Encoders with a masked-LM head; ModernBERT's local layers see a window of positions.
ENCODERS = ("bert", "modernbert")

#: Attention functions that take a mask of any shape. Flash attention would ignore it.
ATTENTIONS = ("sdpa", "eager")

#: transformers' grouped product of experts, which takes no float64.
GROUPED = "grouped_mm"


class StockTextModel:
    """Shows a transformers decoder, or an encoder with a masked-LM head, to the decoding loop.

    Exact: forwards over any partition of the tokens with one key store equal one forward of all, if visibility allows
    the order of the parts (causal, block-causal).

    Args:
        module: a `...ForCausalLM` of `families.DECODERS`, or a BERT or ModernBERT `...ForMaskedLM`. It is used as it
            is, on its device, in its dtype and in eval mode, and not changed.
        adapter: its row.
        mask_token_id: fed where nothing is decided; needed with ``adapter.noise == "mask"``.
        eos_token_ids: tokens that end a text.

    Raises:
        UnsupportedError: an architecture, attention function or rotary embedding whose result would be wrong.
        ArgumentError: a mask token that is missing or outside the vocabulary, or a module in training mode.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    >>> llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> model = StockTextModel(llama, TextAdapter(name="mdlm", attention="full"), mask_token_id=8)
    >>> order = torch.arange(3)[None]
    >>> model.forward(order, order, order, torch.ones(1, 3, 3, dtype=torch.bool), None).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        module: PreTrainedModel,
        adapter: TextAdapter,
        *,
        mask_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        _check_module(module, adapter)
        self.module, self.adapter = module, adapter
        self.base: nn.Module = module.base_model
        self.transform = module.get_submodule(adapter.transform) if adapter.transform else None
        self.head = head_of(module)
        self.plan: TextPlan | None = None  # how it is shared out over ranks
        self.vocab_size = self.head.vocab_size
        self.max_positions: int | None = getattr(module.config, "max_position_embeddings", None)
        self.device = self.head.weight.device
        self.mask_token_id = check_mask_token(adapter, mask_token_id, self.vocab_size)
        self.eos_token_ids = tuple(eos_token_ids)
        self._flops = weight_flops(self.base) + (weight_flops(self.transform) if self.transform else 0.0)

    @property
    def layers(self) -> int:
        """Counts its layers."""
        return self.module.config.num_hidden_layers

    @property
    def source(self) -> str:
        """Returns the folder it was loaded from; empty for a module that was made."""
        return self.module.config.name_or_path or ""

    @property
    def hidden_size(self) -> int:
        """Returns the size of its states."""
        return self.head.weight.shape[1]

    @property
    def num_weights(self) -> int:
        """Counts its weights, on a rank those that it holds."""
        return sum(weight.numel() for weight in self.module.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Returns the type of its weights."""
        return self.head.weight.dtype

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Returns the embeddings of tokens as they are stored, `[tokens, C]`."""
        table: Any = self.module.get_input_embeddings()
        return torch.nn.functional.embedding(torch.tensor(tokens, device=self.device), table.weight)

    def read(self, states: Tensor) -> Tensor:
        """Computes logits from states with the head, `[..., C]` to `[..., V]`."""
        return head_logits(self.head, states.flatten(0, -2)).unflatten(0, states.shape[:-1])

    def key_store(self, rows: int, slots: int) -> SlotKeyStore | None:
        """Allocates a store for `rows` rows of `slots` positions; None for an encoder."""
        if not self.adapter.keeps_keys:
            return None
        return SlotKeyStore(layers=self.module.config.num_hidden_layers, rows=rows, slots=slots)

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
        """Returns the last hidden states `[B, Q, C]`, after norm and transform; see `TextModel.forward`."""
        return self._read({"input_ids": tokens}, tokens, positions, slots, visible, keys, rows)

    @torch.no_grad()
    def forward_mixed(
        self,
        tokens: Tensor,
        mask_share: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        keys: KeyStore | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Returns the same for embeddings between those of tokens and mask; see `MixingTextModel.forward_mixed`.

        Raises:
            UnsupportedError: the model has no mask token.
        """
        if self.mask_token_id is None:
            raise UnsupportedError(f"{self.adapter.name} has no mask token to mix with; call forward()")
        embed = self.module.get_input_embeddings()
        mask = embed(tokens.new_tensor(self.mask_token_id))
        embedded = embed(tokens)
        mixed = embedded + mask_share[..., None].to(embedded.dtype) * (mask - embedded)
        return self._read({"inputs_embeds": mixed}, tokens, positions, slots, visible, keys, rows)

    def _read(
        self,
        call: dict[str, Any],
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        keys: KeyStore | None,
        rows: Tensor | None,
    ) -> Tensor:
        """Calls the module with token ids or embeddings."""
        if keys is not None and not isinstance(keys, SlotKeyStore):
            raise ArgumentError(f"forward() needs a store from key_store(), found {type(keys).__name__}")
        if keys is not None and not self.adapter.keeps_keys:
            raise UnsupportedError(f"{self.adapter.name} keeps no keys; give keys=None and all tokens of each row")
        check_call(tokens, positions, slots, visible, keys)
        call["position_ids"] = positions
        if keys is not None:
            keys.at(slots, rows)
            call[cache_name(self.base)] = keys
        if self.module.config.model_type in DECODERS:
            call["use_cache"] = keys is not None
        call["attention_mask"] = self._masks(visible, positions)
        hidden = self.base(**call, return_dict=True).last_hidden_state
        return hidden if self.transform is None else self.transform(hidden)

    def _masks(self, visible: Tensor, positions: Tensor) -> Tensor | dict[str, Tensor]:
        config = self.module.config
        full = self._mask(visible)
        if config.model_type != "modernbert":
            return full
        near = (positions[:, :, None] - positions[:, None, :]).abs() <= config.sliding_window
        return {"full_attention": full, "sliding_attention": self._mask(visible & near)}

    def _mask(self, visible: Tensor) -> Tensor:
        return attention_mask(visible, str(self.module.config._attn_implementation), self.head.weight.dtype)

    def flops(self, queries: int, keys: int) -> float:
        """Counts operations, two per multiply-add, of `queries` tokens that see `keys` keys each, without the head."""
        config = self.module.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_pair = 4.0 * config.num_hidden_layers * config.num_attention_heads * width
        return queries * (self._flops + per_pair * keys)


def attention_mask(visible: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    """Turns bool `[B, Q, S]` into the 4-D mask that a stock module passes on untouched.

    A query that sees nothing would be nan under some kernels and an average under others; here it sees everything,
    which is finite. Its hidden state has no meaning, and its key is in a slot that is never visible.

    Args:
        visible: which slots each query attends to.
        attention: "sdpa" takes bool; "eager" adds 0 or the least number of the dtype to the scores.
        dtype: that of the hidden states.

    Returns:
        `[B, 1, Q, S]`.

    >>> attention_mask(torch.tensor([[[True, False]]]), "eager", torch.float32).tolist()
    [[[[0.0, -3.4028234663852886e+38]]]]
    """
    seen = (visible | ~visible.any(-1, keepdim=True))[:, None]
    if attention == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def head_of(module: PreTrainedModel) -> Head:
    """Returns the output embedding, with the module's changes to its result.

    Raises:
        UnsupportedError: the module has no output embedding.
    """
    output = module.get_output_embeddings()
    weight = getattr(output, "weight", None)
    if not isinstance(weight, Tensor):
        raise UnsupportedError(f"{type(module).__name__} has no output embedding: load it with its language-model head")
    config = module.config.get_text_config()
    bias = getattr(output, "bias", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=scale,
        shard=shard_of(module),
    )


def weight_flops(module: nn.Module) -> float:
    """Counts 2 for each weight that one token uses: only chosen experts, no embeddings."""
    config = getattr(module, "config", None)
    chosen = next((n for n in (getattr(config, f, None) for f in ("num_experts_per_tok", "top_k_experts")) if n), 1)
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    # A rank has nothing of layers that others run.
    met = [w for w in module.parameters() if w.dim() > 1 and w.numel() and id(w) not in tables]
    # Three dims are the experts' weights, stacked.
    return sum(2.0 * w.numel() * (min(1.0, chosen / len(w)) if w.dim() == 3 else 1.0) for w in met)


def check_mask_token(adapter: TextAdapter, mask_token_id: int | None, vocab_size: int) -> int | None:
    """Checks the mask token of a model that has one against its vocabulary; None for the others."""
    if adapter.noise != "mask":
        return None
    if mask_token_id is None:
        raise ArgumentError(
            f"{adapter.name} needs a mask token and the configuration names none: give mask_token_id=, "
            f"or set mask_token_id in the configuration"
        )
    if not 0 <= mask_token_id < vocab_size:
        raise ArgumentError(
            f"the mask token {mask_token_id} is outside the vocabulary of {vocab_size} tokens: "
            f"give the mask_token_id= this checkpoint was trained with"
        )
    return mask_token_id


def check_call(tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, keys: SlotKeyStore | None) -> None:
    """Refuses a forward whose shapes do not belong together."""
    batch, queries = tokens.shape if tokens.dim() == 2 else (-1, -1)
    seen = queries if keys is None else keys.slots
    fits = positions.shape == tokens.shape == slots.shape and visible.shape == (batch, queries, seen)
    if not fits or visible.dtype is not torch.bool:
        raise ArgumentError(
            f"forward() needs tokens, positions and slots [B, Q] and visible bool [B, Q, {seen}]; found tokens "
            f"{tuple(tokens.shape)}, positions {tuple(positions.shape)}, slots {tuple(slots.shape)}, "
            f"visible {visible.dtype} {tuple(visible.shape)}"
        )


def _check_module(module: PreTrainedModel, adapter: TextAdapter) -> None:
    config = module.config
    kinds = DECODERS if adapter.keeps_keys else ENCODERS
    if config.model_type not in kinds:
        raise UnsupportedError(
            f"adapter {adapter.name!r} runs {', '.join(kinds)}; found {config.model_type!r}, "
            f"which is not known to use the masks, positions and keys it is given"
        )
    if module.training:
        raise ArgumentError(f"{type(module).__name__} is in training mode, where dropout is active: call .eval()")
    check_attention(module)
    if config.model_type in DECODERS and (why := why_keys_cannot_be_kept(config)) is not None:
        raise UnsupportedError(why)


def check_attention(module: PreTrainedModel) -> None:
    """Refuses attention functions that would ignore a 4-D mask."""
    attention = module.config._attn_implementation
    if attention not in ATTENTIONS:
        raise UnsupportedError(
            f"the model's attention is {attention!r}, which does not take any mask given to it; "
            f'call model.set_attn_implementation("sdpa") (or "eager")'
        )
    if module.dtype is torch.float64 and getattr(module.config, "_experts_implementation", None) == GROUPED:
        raise UnsupportedError(
            f"the model is in float64, which {GROUPED} of its experts does not take; "
            f'call model.set_experts_implementation("eager")'
        )
