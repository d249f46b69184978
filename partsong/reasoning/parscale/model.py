"""Runs P streams of one model, which differ in their learned prefixes and are joined by a learned weighted sum.

Every row of a batch runs P times at once, each time after a different learned prefix of keys and values in every layer.
After the last norm a small network weighs the P hidden states of each token, and their sum goes to the one head. See
Chen et al., "Parallel Scaling Law for Language Models", arXiv 2505.10475.

The model stays the user's: two hooks on its decoder do all of this, and `ParScale.undo` takes them off.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.knobs import Count, check_value
from partsong.parallel.text.cache_names import CACHE_NAMES, cache_name, given_cache, result_name
from partsong.reasoning.parscale.cache import ParScaleCache
from partsong.reasoning.parscale.weights import StreamWeights, check_model

__all__ = ["ParScale"]

#: Kinds of attention that read a padding mask as long as the cache, as the prefix needs it.
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3")


class ParScale:
    """Attaches streams to a model.

    Calls of the model, and of its `generate`, then run `num_streams` streams or, if they are given a cache, as many as
    that has. One stream without weights changes nothing at all. Hidden states and attentions, if asked for, are those
    of all streams, `[streams * batch, ...]`, stream by stream.

    Args:
        model: a transformers model of `FAMILIES`, or its decoder.
        *weights: prefixes and aggregators, one for each number of streams that calls may ask for.
        num_streams: streams of calls that give no cache. Default: those of the first weights; 1 without weights.

    Raises:
        UnsupportedError: results would be wrong for the family, the attention or the model, or it has streams already.
        ArgumentError: weights have other sizes than the model, or two have the same number of streams.
        ArgumentTypeError: not a transformers model, or not `StreamWeights`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> with ParScale(model, StreamWeights.new(model, 4)) as streams:
    ...     four = model(torch.tensor([[1, 2]])).logits
    ...     base = model(torch.tensor([[1, 2]]), past_key_values=streams.cache(1)).logits
    >>> torch.equal(base, model(torch.tensor([[1, 2]])).logits)
    True
    """

    def __init__(self, model: PreTrainedModel, *weights: StreamWeights, num_streams: int | None = None) -> None:
        check_model(model)
        self.model = model
        self._decoder: Any = model.base_model
        if any(isinstance(getattr(x, "__self__", None), ParScale) for x in self._decoder._forward_hooks.values()):
            raise UnsupportedError(
                "this model has ParScale attached; undo() that first, or give it all weights at once"
            )
        if weights and not hasattr(Cache, "get_query_offset"):
            raise UnsupportedError(
                f"ParScale with weights needs transformers 5.14 or newer, found {transformers.__version__}: "
                "the installed version has no Cache.get_query_offset, by which masks see a prefix"
            )
        self.weights: dict[int, StreamWeights] = {}
        for one in weights:
            if not isinstance(one, StreamWeights):
                raise ArgumentTypeError(f"weights are StreamWeights, found {type(one).__name__}")
            one.check(model.config)
            if one.num_streams in self.weights:
                raise ArgumentError(f"two weights for {one.num_streams} streams; give one for each number")
            self.weights[one.num_streams] = one
        self._num_streams = self._check_number(next(iter(self.weights), 1) if num_streams is None else num_streams)
        self._names = list(inspect.signature(self._decoder.forward).parameters)
        #: Caches of transformers that a call of several streams was given and replaced by its own.
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks = (
            self._decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            self._decoder.register_forward_hook(self._join, with_kwargs=True),
        )

    @property
    def num_streams(self) -> int:
        """Returns the streams of calls that give no cache; set it to any number that has weights, or 1."""
        return self._num_streams

    @num_streams.setter
    def num_streams(self, num: int) -> None:
        self._num_streams = self._check_number(num)

    @contextmanager
    def using(self, num_streams: int) -> Iterator[ParScale]:
        """Runs `num_streams` streams in the calls within, unless their cache has another number."""
        before, self.num_streams = self._num_streams, num_streams
        try:
            yield self
        finally:
            self._num_streams = before

    def cache(self, num_streams: int | None = None) -> ParScaleCache:
        """Makes an empty cache; a call that gets it runs its number of streams.

        Args:
            num_streams: how many. Default: `num_streams` of this object.

        Raises:
            ArgumentError: there are no weights for this number of streams.
        """
        num = self._num_streams if num_streams is None else self._check_number(num_streams)
        layers = self.model.config.num_hidden_layers
        if num not in self.weights:
            return ParScaleCache((), (), layers)
        return ParScaleCache(tuple(self.weights[num].prefix_k), tuple(self.weights[num].prefix_v), layers)

    def undo(self) -> None:
        """Takes the hooks off, so that the model is as it was. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> ParScale:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def _check_number(self, num: int) -> int:
        check_value("num_streams", num, Count)
        if num != 1 and num not in self.weights:
            known = ", ".join(map(str, sorted({1, *self.weights})))
            raise ArgumentError(f"{num} streams asked for, but there are weights for {known}; train or load others")
        return num

    def _before(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Repeats a call's rows, and gives it the prefixes."""
        call: dict[str, Any] = {**dict(zip(self._names, args, strict=False)), **keywords}
        cache = given_cache(call)
        own = isinstance(cache, ParScaleCache)
        num = cache.num_streams if own else self._num_streams
        if cache is not None and cache in self._replaced:
            raise ArgumentError(
                "this cache was replaced by one with prefixes in an earlier call; go on with that call's "
                "cache, or start from ParScale.cache()"
            )
        if (cache.source is None) if own else num not in self.weights:
            return None
        self._check_call(module, call)
        if not own:
            uses, has_cache = call.get("use_cache"), cache is not None
            if has_cache:
                self._replaced.add(cache)
            cache = self.cache(num)
            # Some families return the cache they were given, which the caller did not ask for here.
            cache.passing = not has_cache and not (self.model.config.use_cache if uses is None else uses)
        ids = call.get("input_ids")
        batch = len(call["inputs_embeds"] if ids is None else ids)
        cache.expect(num * batch)
        call = {name: value for name, value in call.items() if name not in CACHE_NAMES} | {cache_name(module): cache}
        mask = call.get("attention_mask")
        if mask is not None:
            call["attention_mask"] = torch.cat([mask.new_ones(len(mask), cache.prefix_length), mask], dim=1)
        for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids"):
            value = call.get(name)
            if value is not None and len(value) == batch:  # positions may be one row for all
                call[name] = value.repeat(num, *(1,) * (value.ndim - 1))
        return (), call

    def _join(self, module: nn.Module, args: tuple[Any, ...], call: dict[str, Any], out: Any) -> Any:
        """Joins the streams after the last norm."""
        cache = given_cache(call)
        if not isinstance(cache, ParScaleCache) or cache.source is None:
            return out
        weights = self.weights[cache.num_streams]
        if isinstance(out, tuple):
            rest = (each for each in out[1:] if each is not cache or not cache.passing)
            return weights.aggregate(out[0]), *rest
        out.last_hidden_state = weights.aggregate(out.last_hidden_state)
        if cache.passing:
            setattr(out, result_name(out), None)
        return out

    def _check_call(self, module: Any, call: dict[str, Any]) -> None:
        kind = self.model.config._attn_implementation
        if kind not in _ATTENTION:
            raise UnsupportedError(f"several streams do not run with attention {kind!r}; use {' or '.join(_ATTENTION)}")
        if module.training and any(getattr(each, "gradient_checkpointing", False) for each in module.modules()):
            raise UnsupportedError(
                "gradient checkpointing drops the cache, and with it the prefixes: turn it off for training"
            )
        cache, mask, places = given_cache(call), call.get("attention_mask"), call.get("position_ids")
        if isinstance(cache, ParScaleCache):
            if cache.source is not self.weights[self._check_number(cache.num_streams)].prefix_k[0]:
                raise ArgumentError("this cache belongs to other weights; make one with the cache() of this ParScale")
        elif cache is not None and (type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length()):
            raise UnsupportedError(
                f"several streams need the cache of ParScale.cache() or an empty DynamicCache, found "
                f"{type(cache).__name__} of {cache.get_seq_length()} tokens"
            )
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise UnsupportedError("several streams take only an attention_mask [batch, tokens] that marks padding")
        if cache is None and mask is None and places is not None and bool((places.diff(dim=-1) != 1).any()):
            raise UnsupportedError(
                "position_ids that start anew mean packed rows; several streams take one text per row"
            )
