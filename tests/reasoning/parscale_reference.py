"""ParScale worked out in the plainest way: one stream, one layer and one head after the other, no cache and no hook."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from partsong.reasoning.parscale.weights import StreamWeights
from tests.tiny_models.text import causal_model

BUILT_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")


def tiny(family: str, **more: Any) -> PreTrainedModel:
    """A random model in float64 whose logits depend strongly on the context."""
    model = causal_model(family, **{"eos_token_id": None, "initializer_range": 0.3} | more)
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and family in BUILT_LIKE_LLAMA:
            # Transformers takes norms in float32 whatever the type, which would hide errors of up to 1e-6.
            module.forward = partial(_norm, module)
    return model


def streams(model: PreTrainedModel, num: int, **more: Any) -> StreamWeights:
    """Weights under which every stream says something else, and is weighed by what it says."""
    made = StreamWeights.new(model, num, **{"prefix_length": 5, "spread": 1.0, "smoothing": 0.1, **more})
    draw = torch.Generator().manual_seed(num)
    with torch.no_grad():
        for each in made.aggregate_layer.parameters():
            each.copy_(torch.randn(each.shape, generator=draw, dtype=each.dtype) * 0.5)
    return made


@torch.no_grad()
def plain_logits(model: Any, weights: StreamWeights, ids: list[int]) -> Tensor:
    """Logits of one text, `[tokens, vocabulary]`, for models built like Llama, with or without norms of heads."""
    hidden = torch.stack([_stream(model, weights, stream, ids) for stream in range(weights.num_streams)])
    if weights.num_streams == 1:
        return torch.stack([model.lm_head.weight @ one for one in hidden[0]])
    layers: Any = weights.aggregate_layer
    first, _, last = layers
    said = []
    for token in range(len(ids)):
        features = [hidden[p, token, h] for h in range(hidden.shape[2]) for p in range(weights.num_streams)]
        inner = first.weight @ torch.stack(features) + first.bias
        scores = last.weight @ (inner / (1 + torch.exp(-inner))) + last.bias
        shares = torch.exp(scores) / torch.exp(scores).sum()
        shares = shares * (1 - weights.smoothing) + weights.smoothing / weights.num_streams
        said.append(sum(share * hidden[p, token] for p, share in enumerate(shares)))
    return torch.stack([model.lm_head.weight @ one for one in said])


def _stream(model: Any, weights: StreamWeights, stream: int, ids: list[int]) -> Tensor:
    config, x = model.config, model.model.embed_tokens.weight[ids]
    for number, layer in enumerate(model.model.layers):
        own = weights.prefix_k[number][stream], weights.prefix_v[number][stream]
        x = x + _attention(config, layer.self_attn, _norm(layer.input_layernorm, x), own)
        y = _norm(layer.post_attention_layernorm, x)
        gate = y @ layer.mlp.gate_proj.weight.T
        x = x + (gate / (1 + torch.exp(-gate)) * (y @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return _norm(model.model.norm, x)


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + module.variance_epsilon)


def _attention(config: Any, module: Any, x: Tensor, prefix: tuple[Tensor, Tensor]) -> Tensor:
    size, group = module.head_dim, config.num_attention_heads // config.num_key_value_heads
    found = []
    for name in ("q", "k", "v"):
        linear = getattr(module, f"{name}_proj")
        heads = (x @ linear.weight.T + (0 if linear.bias is None else linear.bias)).unflatten(1, (-1, size))
        if hasattr(module, f"{name}_norm"):
            heads = _norm(getattr(module, f"{name}_norm"), heads)
        found.append(heads.transpose(0, 1) if name == "v" else _turn(config, heads.transpose(0, 1)))
    query, key, value = found
    parts = []
    for head in range(config.num_attention_heads):
        keys = torch.cat([prefix[0][head // group], key[head // group]])
        values = torch.cat([prefix[1][head // group], value[head // group]])
        rows = []
        for place in range(len(x)):
            seen = len(prefix[0][0]) + place + 1
            scores = torch.exp(keys[:seen] @ query[head, place] / math.sqrt(size))
            rows.append(scores @ values[:seen] / scores.sum())
        parts.append(torch.stack(rows))
    linear = module.o_proj
    return torch.cat(parts, dim=-1) @ linear.weight.T + (0 if linear.bias is None else linear.bias)


def _turn(config: Any, heads: Tensor) -> Tensor:
    """Rotary embedding from position 0; the model works its angles out in float32, and so does this."""
    size = heads.shape[-1]
    theta = config.rope_parameters["rope_theta"]
    speed = 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    angle = torch.arange(heads.shape[1])[:, None].float() * speed
    cos, sin = angle.cos().double(), angle.sin().double()
    left, right = heads[..., : size // 2], heads[..., size // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
