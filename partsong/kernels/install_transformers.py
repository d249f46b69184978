"""Registers an attention function with transformers, and a mask function, without which padding would be dropped."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.library_calls import NAME, attend, unsupported
from partsong.kernels.masks import Causal

__all__ = ["install_transformers", "transformers_attention", "transformers_mask"]


def install_transformers() -> Callable[[], None]:
    """Registers the two functions and returns what unregisters them.

    Raises:
        ArgumentError: the name is taken.
        UnsupportedError: transformers is missing, or its registries do not have the form of 5.23.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError("install(transformers=True) needs transformers, which is not installed")
    transformers = importlib.import_module("transformers")
    names = ("AttentionInterface", "AttentionMaskInterface")
    registries: list[Any] = [getattr(transformers, name, None) for name in names]
    tables: list[Any] = [getattr(registry, "_global_mapping", None) for registry in registries]
    if not all(isinstance(table, dict) and "sdpa" in table for table in tables) or not _mask_is_known(tables[1]):
        raise UnsupportedError(
            f"transformers {transformers.__version__} keeps its attention and mask functions in another form than 5.23 "
            "does, so nothing is added to them: use that version"
        )
    if any(NAME in table for table in tables):
        raise ArgumentError(f"transformers has an attention called {NAME!r} already: undo that one first")
    for registry, function in zip(registries, (transformers_attention, transformers_mask), strict=True):
        registry.register(NAME, function)

    def undo() -> None:
        for table in tables:
            table.pop(NAME, None)

    return undo


def _mask_is_known(masks: dict[str, Any]) -> bool:
    taken = inspect.signature(masks["sdpa"]).parameters
    return {"batch_size", "q_length", "kv_length", "allow_is_causal_skip"} <= set(taken)


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention in the form of transformers' ``AttentionInterface``.

    Args:
        module: the model's attention module; its ``is_causal`` holds where the argument is None.
        query: `[B, Hq, Lq, D]`.
        key: `[B, Hkv, Lk, D]`, grouped key heads as they are.
        value: `[B, Hkv, Lk, Dv]`.
        attention_mask: four dims, bool or float, from `transformers_mask` or the user's own; None is no mask or, for
            causal modules, the causal one whose last query sees every key.
        scaling: factor on q.k.
        dropout: must be 0.
        is_causal: whether the module is causal; looked at only without a mask.
        position_bias: float `[1 or B, Hq, Lq, Lk]`, added to the logits.
        s_aux: attention sinks `[Hq]`: one more logit per head, which takes weight and has no value.
        kwargs: what else the model passes on.

    Returns:
        out `[B, Lq, Hq, Dv]`, contiguous, and None in place of the attention weights.

    Raises:
        ArgumentError: shapes, dtypes or masks that do not fit.
        UnsupportedError: dropout, softcapping, attention weights, a paged cache, packed sequences or a sliding window
            without a mask that says so, more causal queries than keys, or sinks of another size.
    """
    _check(query, key, attention_mask, dropout, s_aux, kwargs)
    causal = None
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and is_causal and query.shape[2] > 1:
        causal = _last_query_sees_all(query.shape[2], key.shape[2])
    out, lse = attend(query, key, value, mask=attention_mask, causal=causal, scale=scaling, bias=position_bias)
    if s_aux is not None:
        # The sink joins the denominator: exp(lse) / (exp(lse) + exp(sink)) of the weight is left.
        left = torch.sigmoid(lse - s_aux.to(lse.dtype).view(1, -1, 1))
        out = (out * left.unsqueeze(-1)).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _last_query_sees_all(num_queries: int, num_keys: int) -> Causal:
    if num_queries > num_keys:
        raise unsupported(
            "transformers", f"causal attention of {num_queries} queries to {num_keys} keys", "pass a mask"
        )
    return Causal(num_keys - num_queries)


def _check(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, sinks: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Refuses what would change the result and is not computed here."""
    if dropout:
        raise unsupported("transformers", f"dropout {dropout}", "call model.eval() or set attention_dropout to 0")
    if kwargs.get("softcap") is not None:
        raise unsupported("transformers", f"softcap={kwargs['softcap']}", "use the eager implementation for this model")
    if kwargs.get("output_attentions"):
        raise unsupported("transformers", "the attention weights", "use the eager implementation to look at them")
    if kwargs.get("cache") is not None:
        raise unsupported("transformers", "a paged cache (continuous batching)", "use generate without it")
    if sinks is not None and sinks.numel() != query.shape[1]:
        raise unsupported("transformers", f"{sinks.numel()} sinks for {query.shape[1]} heads", "pass one per head")
    if mask is not None:
        return
    window, edges = kwargs.get("sliding_window"), kwargs.get("cu_seq_lens_q")
    if window is not None and key.shape[2] > window:
        raise unsupported(
            "transformers", f"a window of {window} over {key.shape[2]} keys without a mask", "pass a mask"
        )
    if edges is not None and edges.numel() > 2:
        raise unsupported(
            "transformers", "packed sequences without a mask", "pass position_ids and no cache, or a mask"
        )


def transformers_mask(
    batch_size: int, q_length: int, kv_length: int, *, allow_is_causal_skip: bool = True, **kwargs: Any
) -> Tensor | None:
    """Builds the mask in the form of transformers' ``AttentionMaskInterface``: as "sdpa" does, but for one case.

    "sdpa" leaves the mask out where a static cache is filled for the first time, as PyTorch aligns the causal mask at
    the first key; `transformers_attention` aligns it at the last one, so there it is written out.

    Args:
        batch_size: B.
        q_length: Lq.
        kv_length: Lk.
        allow_is_causal_skip: whether None may stand for a plain causal mask.
        kwargs: what ``sdpa_mask`` takes besides.

    Returns:
        bool `[B, 1, Lq, Lk]`, True = attend, or None.
    """
    mask = importlib.import_module("transformers.masking_utils").sdpa_mask
    skip = allow_is_causal_skip and q_length in (1, kv_length)
    return mask(batch_size, q_length, kv_length, allow_is_causal_skip=skip, **kwargs)
