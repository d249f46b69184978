"""The published architectures in plain torch, from the checkpoints' own tensor names and configurations.

Nothing of transformers and nothing of the loaders: what the loaders' modules must compute. Norms and rotary angles are
in float32 as in the published code, the rest in the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    single = x.float()
    return weight * (single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, theta: float, part: float = 1.0) -> Tensor:
    """Rotary embedding of `[B, H, T, D]` at positions 0, 1, ...: the first `part` of each head, in halves."""
    size = int(x.shape[-1] * part)
    frequency = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, two, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Heads `[B, H, T, D]` and `[B, Hkv, T, D]` to `[B, T, H * D]`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def llada(w: Weights, c: dict[str, Any], tokens: Tensor, visible: Tensor) -> Tensor:
    top, eps, width = "model.transformer.", c["rms_norm_eps"], c["d_model"] // c["n_heads"]
    x = w[f"{top}wte.weight"][tokens]
    for n in range(c["n_layers"]):
        b = {k: w[f"{top}blocks.{n}.{k}.weight"] for k in LLADA_BLOCK}
        y = rms(x, b["attn_norm"], eps)
        q, k, v = (heads(y @ b[f"{p}_proj"].T, width) for p in "qkv")
        q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
        x = x + attend(q, k, v, visible) @ b["attn_out"].T
        x = x + swiglu(rms(x, b["ff_norm"], eps), b["ff_proj"], b["up_proj"], b["ff_out"])
    x = rms(x, w[f"{top}ln_f.weight"], eps)
    logits = x @ w[f"{top}{'wte' if c.get('weight_tying') else 'ff_out'}.weight"].T
    return logits / c["d_model"] ** 0.5 if c.get("scale_logits") else logits


LLADA_BLOCK = ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out")


def llada2(w: Weights, c: dict[str, Any], tokens: Tensor, visible: Tensor) -> Tensor:
    eps, width, h, kv = c["rms_norm_eps"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    x = w["model.word_embeddings.weight"][tokens]
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        y = rms(x, w[f"{p}input_layernorm.weight"], eps) @ w[f"{p}attention.query_key_value.weight"].T
        y = y + w.get(f"{p}attention.query_key_value.bias", 0.0)
        q, k, v = heads(y, width).split([h, kv, kv], 1)
        q, k = (
            rms(q, w[f"{p}attention.query_layernorm.weight"], eps),
            rms(k, w[f"{p}attention.key_layernorm.weight"], eps),
        )
        q, k = (rotate(z, c["rope_theta"], c["partial_rotary_factor"]) for z in (q, k))
        x = x + attend(q, k, v, visible) @ w[f"{p}attention.dense.weight"].T
        y = rms(x, w[f"{p}post_attention_layernorm.weight"], eps)
        if n < c["first_k_dense_replace"]:
            x = x + swiglu(y, *mlp(w, f"{p}mlp."))
        else:
            routed = torch.stack([torch.stack([llada2_routed(w, c, f"{p}mlp.", t) for t in row]) for row in y])
            x = x + routed + swiglu(y, *mlp(w, f"{p}mlp.shared_experts."))
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def mlp(w: Weights, prefix: str) -> Iterator[Tensor]:
    return (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))


def llada2_routed(w: Weights, c: dict[str, Any], prefix: str, x: Tensor) -> Tensor:
    """One token `[C]` through its experts: one at a time, in words of the report."""
    score = torch.sigmoid(w[f"{prefix}gate.weight"].float() @ x.float())
    biased = score + w.get(f"{prefix}gate.expert_bias", torch.zeros(())).float()
    size = c["num_experts"] // c["n_group"]
    groups = [sum(sorted(biased[g * size : (g + 1) * size].tolist())[-2:]) for g in range(c["n_group"])]
    best = sorted(range(c["n_group"]), key=lambda g: -groups[g])[: c["topk_group"]]
    allowed = [e for e in range(c["num_experts"]) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -float(biased[e]))[: c["num_experts_per_tok"]]
    total = score[chosen].sum() if len(chosen) > 1 else torch.ones(())
    out = torch.zeros_like(x)
    for e in chosen:
        weight = score[e] / total * c["routed_scaling_factor"]
        out = out + weight * swiglu(x, *mlp(w, f"{prefix}experts.{e}."))
    return out


def qwen(w: Weights, c: dict[str, Any], tokens: Tensor, visible: Tensor) -> Tensor:
    """Dream, Fast-dLLM v2, SDAR, SDAR-MoE and LLaDA-MoE: biases, norms and experts where there are tensors of them."""
    eps, count = c["rms_norm_eps"], c["num_attention_heads"]
    width = c.get("head_dim") or c["hidden_size"] // count
    x = w["model.embed_tokens.weight"][tokens]
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        y = rms(x, w[f"{p}input_layernorm.weight"], eps)
        a = f"{p}self_attn."
        q, k, v = (heads(y @ w[f"{a}{z}_proj.weight"].T + w.get(f"{a}{z}_proj.bias", 0.0), width) for z in "qkv")
        if f"{a}q_norm.weight" in w:
            q, k = rms(q, w[f"{a}q_norm.weight"], eps), rms(k, w[f"{a}k_norm.weight"], eps)
        q, k = rotate(q, c["rope_theta"]), rotate(k, c["rope_theta"])
        x = x + attend(q, k, v, visible) @ w[f"{a}o_proj.weight"].T
        y = rms(x, w[f"{p}post_attention_layernorm.weight"], eps)
        x = x + (softmax_routed(w, c, f"{p}mlp.", y) if "num_experts" in c else swiglu(y, *mlp(w, f"{p}mlp.")))
    name = "model.embed_tokens.weight" if c.get("tie_word_embeddings") else "lm_head.weight"
    return rms(x, w["model.norm.weight"], eps) @ w[name].T


def softmax_routed(w: Weights, c: dict[str, Any], prefix: str, x: Tensor) -> Tensor:
    probs = (x @ w[f"{prefix}gate.weight"].T).float().softmax(-1)
    rank = probs.argsort(-1, descending=True).argsort(-1)
    weight = torch.where(rank < c["num_experts_per_tok"], probs, 0.0)
    if c.get("norm_topk_prob"):
        weight = weight / weight.sum(-1, keepdim=True)
    parts = [swiglu(x, *mlp(w, f"{prefix}experts.{e}.")) for e in range(c["num_experts"])]
    return sum((weight[..., e, None].to(x.dtype) * part for e, part in enumerate(parts)), torch.zeros_like(x))


#: A forward from public weights: (weights, configuration, tokens `[B, T]`, visible `[B, T, T]`) to logits.
Published = Callable[[Weights, dict[str, Any], Tensor, Tensor], Tensor]
