"""Tiny checkpoints under the public names: random weights, configurations with the published fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.samplers.text import published
from tests.samplers.text.published import Published, Weights

LAYERS, WIDTH, HEADS, VOCAB, INNER, EXPERTS = 2, 24, 4, 40, 20, 8


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4 + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


LLADA: dict[str, Any] = {
    "activation_type": "silu", "alibi": False, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"}, "bias_for_layer_norm": False, "block_group_size": 1,
    "block_type": "llama", "d_model": WIDTH, "embedding_dropout": 0.0, "embedding_size": VOCAB, "eos_token_id": 5,
    "flash_attention": False, "include_bias": False, "include_qkv_bias": False, "init_cutoff_factor": None,
    "init_device": "meta", "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": False, "layer_norm_type": "rms",
    "layer_norm_with_affine": True, "mask_token_id": 39, "max_sequence_length": 64, "mlp_hidden_size": INNER,
    "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": None, "n_heads": HEADS, "n_kv_heads": HEADS,
    "n_layers": LAYERS, "pad_token_id": 5, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-5,
    "rope": True, "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False, "torch_dtype": "float32",
    "transformers_version": "4.46.3", "use_cache": False, "vocab_size": VOCAB, "weight_tying": False,
}  # fmt: skip


def llada_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    top, width, inner = "model.transformer.", c["d_model"], c["mlp_hidden_size"]
    kv = width // c["n_heads"] * c["n_kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {f"{top}wte.weight": (VOCAB, width), f"{top}ln_f.weight": (width,)}
    if not c["weight_tying"]:
        shapes[f"{top}ff_out.weight"] = (VOCAB, width)
    block = {
        "attn_norm": (width,), "q_proj": (width, width), "k_proj": (kv, width), "v_proj": (kv, width),
        "attn_out": (width, width), "ff_norm": (width,), "ff_proj": (inner, width), "up_proj": (inner, width),
        "ff_out": (width, inner),
    }  # fmt: skip
    for n in range(c["n_layers"]):
        shapes |= {f"{top}blocks.{n}.{name}.weight": shape for name, shape in block.items()}
    return shapes


LLADA2: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"], "attention_dropout": 0.0, "embedding_dropout": 0.0, "eos_token_id": 7,
    "auto_map": {"AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM"},
    "first_k_dense_replace": 1, "head_dim": 8, "hidden_act": "silu", "hidden_size": WIDTH, "initializer_range": 0.02,
    "intermediate_size": 28, "max_position_embeddings": 64, "max_window_layers": 28, "mask_token_id": 38,
    "model_type": "llada2_moe", "moe_intermediate_size": INNER, "moe_router_enable_expert_bias": True, "n_group": 4,
    "norm_head": False, "norm_topk_prob": True, "num_attention_heads": HEADS, "num_experts": EXPERTS,
    "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": 2, "num_shared_experts": 2,
    "output_dropout": 0.0, "output_router_logits": False, "pad_token_id": 7, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 600000, "rotary_dim": 4, "routed_scaling_factor": 2.5,
    "router_dtype": "fp32", "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 2,
    "use_bias": False, "use_cache": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True,
    "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip


def llada2_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, h, kv, inner = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"], c["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.word_embeddings.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH),
    }  # fmt: skip
    for n in range(c["num_hidden_layers"]):
        p = f"model.layers.{n}."
        shapes |= {f"{p}input_layernorm.weight": (WIDTH,), f"{p}post_attention_layernorm.weight": (WIDTH,)}
        shapes[f"{p}attention.query_key_value.weight"] = ((h + 2 * kv) * width, WIDTH)
        if c["use_qkv_bias"]:
            shapes[f"{p}attention.query_key_value.bias"] = ((h + 2 * kv) * width,)
        shapes |= {f"{p}attention.{q}_layernorm.weight": (width,) for q in ("query", "key")}
        shapes[f"{p}attention.dense.weight"] = (WIDTH, h * width)
        if n < c["first_k_dense_replace"]:
            shapes |= mlp_shapes(f"{p}mlp.", c["intermediate_size"])
            continue
        shapes[f"{p}mlp.gate.weight"] = (EXPERTS, WIDTH)
        if c["moe_router_enable_expert_bias"]:
            shapes[f"{p}mlp.gate.expert_bias"] = (EXPERTS,)
        shapes |= mlp_shapes(f"{p}mlp.shared_experts.", inner * c["num_shared_experts"])
        for e in range(EXPERTS):
            shapes |= mlp_shapes(f"{p}mlp.experts.{e}.", inner)
    return shapes


def mlp_shapes(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, WIDTH), f"{prefix}up_proj.weight": (inner, WIDTH),
        f"{prefix}down_proj.weight": (WIDTH, inner),
    }  # fmt: skip


_QWEN: dict[str, Any] = {
    "attention_dropout": 0.0, "eos_token_id": 6, "hidden_act": "silu", "hidden_size": WIDTH,
    "initializer_range": 0.02, "intermediate_size": INNER, "mask_token_id": 37, "max_position_embeddings": 64,
    "max_window_layers": 2, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": False, "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
DREAM = _QWEN | {"model_type": "Dream", "architectures": ["DreamModel"], "use_mrope": False, "pad_token_id": 6}
FAST_DLLM = _QWEN | {
    "model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 8,
    "layer_types": ["full_attention"] * LAYERS, "tie_word_embeddings": True,
}  # fmt: skip
SDAR = _QWEN | {
    "model_type": "sdar", "architectures": ["SDARForCausalLM"], "head_dim": 8, "attention_bias": False,
    "fuse_cross_entropy": True,
}  # fmt: skip
_MIXED = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
SDAR_MOE = SDAR | _MIXED | {
    "model_type": "sdar_moe", "architectures": ["SDARMoeForCausalLM"], "moe_intermediate_size": INNER,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LLADA_MOE: dict[str, Any] = {k: v for k, v in _QWEN.items() if k not in ("intermediate_size", "mask_token_id")} | _MIXED
LLADA_MOE = {k: v for k, v in LLADA_MOE.items() if "sliding" not in k and "window" not in k} | {
    "model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "attention_bias": False, "clip_qkv": None,
    "dense_intermediate_size": 32, "expert_intermediate_size": INNER, "shared_expert_intermediate_size": None,
    "moe_layer_freq": [1] * LAYERS, "moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax",
    "norm_topk_prob": None, "num_key_value_heads": HEADS, "partial_rotary_factor": 1, "qk_layernorm": True,
    "rope_theta": 50000, "routed_scaling_factor": 1, "router_num_group": None, "router_topk_group": None,
    "mask_token_id": 36,
}  # fmt: skip


def qwen_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = c.get("head_dim") or WIDTH // HEADS
    normed, mixed = "head_dim" in c or c.get("qk_layernorm"), "num_experts" in c
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    rows = {"q": HEADS * width, "k": c["num_key_value_heads"] * width, "v": c["num_key_value_heads"] * width}
    for n in range(LAYERS):
        p = f"model.layers.{n}."
        shapes |= {f"{p}input_layernorm.weight": (WIDTH,), f"{p}post_attention_layernorm.weight": (WIDTH,)}
        shapes |= {f"{p}self_attn.{z}_proj.weight": (size, WIDTH) for z, size in rows.items()}
        shapes[f"{p}self_attn.o_proj.weight"] = (WIDTH, HEADS * width)
        if normed:
            shapes |= {f"{p}self_attn.{z}_norm.weight": (width,) for z in "qk"}
        else:
            shapes |= {f"{p}self_attn.{z}_proj.bias": (size,) for z, size in rows.items()}
        if not mixed:
            shapes |= mlp_shapes(f"{p}mlp.", INNER)
            continue
        shapes[f"{p}mlp.gate.weight"] = (EXPERTS, WIDTH)
        for e in range(EXPERTS):
            shapes |= mlp_shapes(f"{p}mlp.experts.{e}.", INNER)
    return shapes


#: By a name: configuration, tensor shapes, published forward, adapter's name.
CHECKPOINTS: dict[str, tuple[dict[str, Any], Any, Published, str]] = {
    "llada": (LLADA, llada_shapes, published.llada, "llada"),
    "llada-variant": (
        LLADA | {"weight_tying": True, "n_kv_heads": 2, "scale_logits": True, "train_max_sequence_length": 64},
        llada_shapes, published.llada, "llada",
    ),
    "llada-moe": (LLADA_MOE, qwen_shapes, published.qwen, "llada-moe"),
    "llada2": (LLADA2, llada2_shapes, published.llada2, "llada2"),
    "llada2-variant": (
        LLADA2 | {"model_type": "llada21_moe", "use_qkv_bias": True, "moe_router_enable_expert_bias": False}
        | {"num_experts_per_tok": 1},
        llada2_shapes, published.llada2, "llada2",
    ),
    "dream": (DREAM, qwen_shapes, published.qwen, "dream"),
    "sdar": (SDAR | {"attn_implementation": "flash_attention_2"}, qwen_shapes, published.qwen, "sdar"),
    "sdar-moe": (SDAR_MOE, qwen_shapes, published.qwen, "sdar"),
    "fast-dllm-v2": (FAST_DLLM, qwen_shapes, published.qwen, "fast-dllm-v2"),
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], weights: Weights, shards: int = 1) -> Path:
    """A checkpoint folder, with an index where there is more than one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights)
    index = {}
    for n in range(shards):
        part: dict[str, Tensor] = {name: weights[name] for name in names[n::shards]}
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
