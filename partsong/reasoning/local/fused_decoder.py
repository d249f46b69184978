"""Computes Llama-like decoders with few operations: a step of one text on a CPU waits for Python and not for weights.

Query, key and value are one product, and so are gate and up. Norms, rotations and sums are one operation each where
transformers' modules take several. A decoder stays a module of transformers: what others hook into its embedding, its
output layers or into itself goes on working.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from partsong.reasoning.local.packed_linear import JoinedLinear, is_plain

__all__ = ["FUSED", "fuse_decoder"]

#: Families whose layers do what is written here and no more; each is compared with itself in the tests.
FUSED = ("llama", "mistral", "qwen2", "qwen3")


def fuse_decoder(decoder: Any) -> bool:
    """Lets a decoder of `FUSED` compute with few operations, in place. It must not be shared.

    It stays as it is if its layers have something of their own, such as hooks on their projections.

    Args:
        decoder: the module with ``embed_tokens``, ``layers``, ``norm`` and ``rotary_emb``. Its attention hands queries,
            keys and values to ``partsong_local`` (see `LocalModel`).

    Returns:
        Whether it does.
    """
    # Those without weights let states pass to a rank that has them.
    layers = [each for each in decoder.layers if any(weight.numel() for weight in each.parameters())]
    known = decoder.config.model_type in FUSED and decoder.config.hidden_act == "silu"
    if not known or not all(map(_can_be_fused, layers)):
        return False
    for layer in layers:
        _join(layer.self_attn, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        _join(layer.mlp, "gate_up_proj", ("gate_proj", "up_proj"))
        heads = [size // layer.self_attn.head_dim for size in layer.self_attn.qkv_proj.parts.values()]
        layer.forward = functools.partial(_layer, layer, heads[:2])
    decoder.forward = functools.partial(_decoder, decoder)
    return True


def _can_be_fused(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    joined = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    return all(
        len({each.bias is None for each in group}) == 1 and all(is_plain(each) for each in group) for group in joined
    )


def _join(parent: Any, name: str, parts: tuple[str, ...]) -> None:
    setattr(parent, name, JoinedLinear({part: getattr(parent, part) for part in parts}))
    for part in parts:
        delattr(parent, part)


def _decoder(
    decoder: Any, input_ids: Tensor, position_ids: Tensor, output_hidden_states: bool = False, **_: Any
) -> BaseModelOutputWithPast:
    """Computes what transformers' ``forward`` does, for ids `[1, tokens]` and their positions."""
    x: Tensor = decoder.embed_tokens(input_ids)
    cos, sin = (table[:, :, None] for table in decoder.rotary_emb(x, position_ids=position_ids))
    half = sin.shape[-1] // 2
    turns = cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    states = list[Tensor]()
    for layer in decoder.layers:
        if output_hidden_states:
            states.append(x)
        x = layer(x, turns)
    x = _norm(decoder.norm, x)
    kept: Any = (*states, x) if output_hidden_states else None
    return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=kept)  # pyright: ignore[reportArgumentType]


def _layer(layer: Any, heads: list[int], x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Computes a layer, `[1, tokens, hidden size]`; `heads` are numbers of heads of queries and of keys."""
    attention, mlp = layer.self_attn, layer.mlp
    width: int = attention.head_dim
    projected = attention.qkv_proj(_norm(layer.input_layernorm, x)).unflatten(-1, (-1, width))
    turned, value = projected[:, :, : sum(heads)], projected[:, :, sum(heads) :]
    if hasattr(attention, "q_norm"):
        query, key = turned.split(heads, dim=2)
        turned = torch.cat((_norm(attention.q_norm, query), _norm(attention.k_norm, key)), dim=2)
    cos, sin = turns
    turned = torch.addcmul(turned * cos, turned.roll(width // 2, -1), sin)
    query, key = (each.transpose(1, 2) for each in turned.split(heads, dim=2))
    local = attention.partsong_local
    out = local.attend(attention.layer_idx, query, key, value.transpose(1, 2), attention.scaling)
    x = x + attention.o_proj(out.flatten(2))
    gate, up = mlp.gate_up_proj(_norm(layer.post_attention_layernorm, x)).chunk(2, dim=-1)
    return x + mlp.down_proj(F.silu(gate).mul_(up))


def _norm(norm: Any, x: Tensor) -> Tensor:
    """Computes a root mean square norm, which torch's own function does in more operations on a CPU."""
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    eps = length.new_full((), norm.variance_epsilon)
    scale = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype) * norm.weight
