"""Cuts the tokens of a call of a causal language model over ranks, which give each other their keys and values."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from partsong.errors import UnsupportedError
from partsong.kernels import Causal, attention
from partsong.kernels.key_reuse import why_keys_cannot_be_kept
from partsong.parallel.exchange.key_blocks import empty_block, unpack_keys_values, write_keys_values
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.collectives import all_gather, gather_tokens
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.text.cache_names import cache_name, given_cache

__all__ = ["TextContext"]

#: Options of an attention that change its scores.
_CHANGE_SCORES = ("softcap", "sliding_window", "s_aux")
_numbers = itertools.count()


class _Cut:
    """Says which tokens of a call each rank computes: a piece from the front, and the one as far from the end.

    Args:
        length: tokens of a row.
        axis: the ranks.

    Attributes:
        sizes: tokens of each rank.
        pieces: for each piece of this rank its first token and its length.
        index: this rank's tokens, int64 `[sizes[axis.index]]`.
        back: the place of each token of the row among those of rank 0, rank 1, ..., int64 `[length]`.
    """

    def __init__(self, length: int, axis: Axis, device: torch.device) -> None:
        lengths = split_sizes(length, 2 * axis.size)
        starts = offsets(lengths)
        pairs = [(rank, 2 * axis.size - 1 - rank) for rank in range(axis.size)]
        self.sizes = tuple(lengths[front] + lengths[end] for front, end in pairs)
        self.pieces = tuple((starts[piece], lengths[piece]) for piece in pairs[axis.index])
        places = torch.arange(length, device=device).split(list(lengths))
        self.index = torch.cat([places[piece] for piece in pairs[axis.index]])
        self.back = torch.cat([places[piece] for pair in pairs for piece in pair]).argsort()


class TextContext(TextShards):
    """Cuts calls with many tokens; a cache gets the keys of all tokens on every rank.

    Args:
        model: of transformers.
        axis: the ranks.
        shortest: tokens of a row from which on calls are cut.

    Raises:
        UnsupportedError: tokens of the model see tokens after them, or not all before them.
    """

    def __init__(self, model: Any, axis: Axis, shortest: int) -> None:
        self.model, self.axis, self.shortest = model, axis, max(shortest, 2 * axis.size)
        self._config = model.config.get_text_config()
        layers = [each for each in model.base_model.modules() if isinstance(getattr(each, "layer_idx", None), int)]
        why = why_keys_cannot_be_kept(self._config)
        if not layers or not all(getattr(each, "is_causal", False) for each in layers):
            why = "its layers do not all attend to the tokens before them and to no others"
        elif not model._supports_attention_backend:
            why = "its attention cannot be given to others"
        if why is not None:
            raise UnsupportedError(f"ContextParallel on {type(model).__name__}: {why}; use TensorParallel")
        self._name = f"partsong_context_{next(_numbers)}"
        self._cut: _Cut | None = None
        self._cache: Any = None
        self._before, self._usual = 0, ""

    def attach(self, hooks: HookSet) -> None:
        """Cuts what the decoder is given, and puts its states together again."""
        AttentionInterface.register(self._name, self._attend)
        known: dict[str, Any] = getattr(AttentionInterface, "_global_mapping")  # noqa: B009
        hooks.on_remove(partial(known.pop, self._name))
        base: Any = self.model.base_model
        for hook in (
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            base.register_forward_hook(self._end, always_call=True),
        ):
            hooks.on_remove(hook.remove)

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says that every rank holds all of a weight."""
        return None

    def bytes_sent(self, tokens: int) -> int:
        """Returns the bytes that this rank sends for a prompt of so many tokens in one row, up to its hidden states."""
        if tokens < self.shortest:
            return 0
        config, (size, me) = self._config, (self.axis.size, self.axis.index)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        lengths = split_sizes(tokens, 2 * size)
        numbers = 2 * heads * width * config.num_hidden_layers + config.hidden_size
        return (lengths[me] + lengths[2 * size - 1 - me]) * numbers * (size - 1) * self.model.dtype.itemsize

    def describe(self) -> str:
        """Says in words what is shared out."""
        return f"calls with {self.shortest} or more tokens are cut; shorter ones, and padded ones, run on every rank"

    def _begin(self, base: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        key = "inputs_embeds" if named.get("inputs_embeds") is not None else "input_ids"
        if given:
            named = {**named, "input_ids": given[0]}
        tokens, mask = named[key], named.get("attention_mask")
        length, places = tokens.shape[1], named.get("position_ids")
        if length < self.shortest or len(given) > 1 or _hides(mask) or _is_packed(places):
            return None
        if named.get("output_hidden_states") or named.get("output_attentions"):
            raise UnsupportedError(
                "output_hidden_states or output_attentions: under ContextParallel a rank has those of its own tokens "
                "only; leave them out, or set shortest above the tokens of the call"
            )
        cut = self._cut = _Cut(length, self.axis, tokens.device)
        self._cache, self._before = given_cache(named), 0
        if self._cache is None and named.get("use_cache", self._config.use_cache):
            from transformers import DynamicCache

            self._cache = named[cache_name(base)] = DynamicCache(config=self._config)
        if self._cache is not None:
            self._before = int(self._cache.get_seq_length())
            vars(self._cache)["update"] = _nothing_kept
        self._usual, self._config._attn_implementation = self._config._attn_implementation, self._name
        if places is None:
            places = torch.arange(self._before, self._before + length, device=tokens.device)[None]
        mine = {key: tokens.index_select(1, cut.index), "position_ids": places[..., cut.index], "attention_mask": None}
        return (), {**named, **mine}

    def _end(self, base: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        cut, self._cut = self._cut, None
        if cut is None:
            return None
        self._config._attn_implementation = self._usual
        if self._cache is not None:
            vars(self._cache).pop("update", None)
            self._cache = None
        if output is None:  # an error goes on to the caller
            return None
        states = gather_tokens(self.axis, output[0], cut.sizes, 1, name="states of all tokens")
        states = states.index_select(1, cut.back)
        if isinstance(output, tuple):
            return (states, *output[1:])
        output["last_hidden_state"] = states
        return output

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Computes attention as transformers' ``AttentionInterface`` calls it, `[B, tokens, heads, head_dim]`."""
        changed = [name for name in _CHANGE_SCORES if options.get(name) is not None]
        if changed or attention_mask is not None or key.shape != value.shape:
            raise UnsupportedError(
                f"ContextParallel on {type(self.model).__name__}: its attention has {changed or 'masks of its own'}; "
                "use TensorParallel"
            )
        cut = self._cut
        assert cut is not None
        block = empty_block(key, sum(cut.sizes))
        write_keys_values(block.split(list(cut.sizes))[self.axis.index], key, value)
        all_gather(self.axis, block, cut.sizes, name="keys and values of a layer").wait()
        keys, values = unpack_keys_values(block.index_select(0, cut.back))
        if self._cache is not None:
            keys, values = type(self._cache).update(self._cache, keys, values, module.layer_idx)
        parts = []
        for queries, (first, length) in zip(query.split([each for _, each in cut.pieces], 2), cut.pieces, strict=True):
            begin = self._before + first
            seen = slice(0, begin + length)
            out, _ = attention(queries, keys[:, :, seen], values[:, :, seen], mask=Causal(begin), scale=scaling)
            parts.append(out)
        return torch.cat(parts, dim=2).transpose(1, 2), None


def _hides(mask: Any) -> bool:
    """Says whether a mask hides more than what comes after a token; one of another form is assumed to."""
    if mask is None:
        return False
    return not isinstance(mask, Tensor) or mask.dim() != 2 or not bool(mask.all())


def _is_packed(places: Tensor | None) -> bool:
    """Says whether a row holds several texts, which do not see each other: positions do not rise by one."""
    return places is not None and not bool((places.diff(dim=-1) == 1).all())


def _nothing_kept(keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    """Stands in for a cache's ``update`` until the keys of all ranks are there."""
    return keys, values
