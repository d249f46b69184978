"""Loads LLaDA 8B and 1.5 as a stock Llama, LLaDA-MoE as a stock Qwen3-MoE.

LLaDA (arXiv 2502.09992) is Llama's block under other names: RMS norms before attention and feed-forward, rotary
embedding in halves, SwiGLU. LLaDA-MoE (arXiv 2509.24389) normalises queries and keys per head, which OLMoE's module
does over all heads together and Qwen3-MoE's per head; its router is a softmax over all experts, not renormalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from partsong.errors import UnsupportedError
from partsong.samplers.text.rekey import Fields, Rekeying, expert_layers, new_names, outer_weights, shared_settings

__all__ = ["llada", "llada_moe"]

#: A LLaDA block's tensors and the Llama layer's.
_BLOCK = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def llada(config: Mapping[str, Any]) -> Rekeying:
    """Maps LLaDA 8B and 1.5 onto Llama; errors as in `Loader`."""
    fields = Fields(config, "LLaDA")
    width, heads, layers = fields.need("d_model"), fields.need("n_heads"), fields.need("n_layers")
    vocab = fields.get("embedding_size", fields.need("vocab_size"))
    tied = bool(fields.get("weight_tying", False))
    inner = fields.get("mlp_hidden_size") or fields.need("mlp_ratio") * width
    kv_heads = 1 if fields.get("multi_query_attention", False) else heads
    stock = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.get("n_kv_heads", kv_heads),
        max_position_embeddings=fields.get("max_sequence_length", 4096),
        rms_norm_eps=fields.need("rms_norm_eps"),
        rope_parameters=fields.rotary(),
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=None,
    )
    if fields.get("scale_logits", False):
        stock.logit_scale = width**-0.5
    _check_llada(fields)
    names = {"wte": "model.embed_tokens", "ln_f": "model.norm"} | ({} if tied else {"ff_out": "lm_head"})
    for layer in range(layers):
        names |= {f"blocks.{layer}.{name}": f"model.layers.{layer}.{target}" for name, target in _BLOCK.items()}
    places = new_names({f"model.transformer.{name}.weight": f"{target}.weight" for name, target in names.items()})
    return Rekeying(model_class=LlamaForCausalLM, config=stock, places=places)


def _check_llada(fields: Fields) -> None:
    fields.allow_only(
        activation_type="silu",
        alibi=False,
        attention_layer_norm=False,
        block_group_size=1,
        block_type="llama",
        clip_qkv=None,
        include_bias=False,
        include_qkv_bias=False,
        input_emb_norm=False,
        layer_norm_type="rms",
        layer_norm_with_affine=True,
        bias_for_layer_norm=False,
        rope=True,
    )
    # Dropout is off in eval mode, and a rotation in float32 is the same rotation, rounded later.
    fields.ignore("residual_dropout", "embedding_dropout", "alibi_bias_max", "attention_layer_norm_with_affine")
    fields.ignore("flash_attention", "precision", "rope_full_precision", "mlp_ratio", "mlp_hidden_size")
    fields.ignore("train_max_sequence_length")  # saved by Fast-dLLM's code, but read by no forward
    fields.refuse_unread()


def llada_moe(config: Mapping[str, Any]) -> Rekeying:
    """Maps LLaDA-MoE 7B-A1B onto Qwen3-MoE; errors as in `Loader`."""
    fields = Fields(config, "LLaDA-MoE")
    shared = shared_settings(fields)
    layers, count, inner = (fields.need(f) for f in ("num_hidden_layers", "num_experts", "expert_intermediate_size"))
    stock = Qwen3MoeConfig(
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_experts=count,
        num_experts_per_tok=fields.need("num_experts_per_tok"),
        norm_topk_prob=False,
        **shared,
    )
    stock.head_dim = shared["hidden_size"] // shared["num_attention_heads"]
    _check_llada_moe(fields, layers)
    places = outer_weights(shared["tie_word_embeddings"]) | expert_layers(layers, count, inner)
    return Rekeying(model_class=Qwen3MoeForCausalLM, config=stock, places=places)


def _check_llada_moe(fields: Fields, layers: int) -> None:
    fields.allow_only(
        attention_bias=False,
        clip_qkv=None,
        moe_router_enable_expert_bias=False,
        moe_router_score_function="softmax",
        # The published forward never renormalises, so a checkpoint that asks for it is another model.
        norm_topk_prob=False,
        partial_rotary_factor=1,
        qk_layernorm=True,
        routed_scaling_factor=1,
        # No groups; the published configuration class writes that as -2, too.
        router_num_group=(1, 0, -1, -2),
        router_topk_group=(1, 0, -1, -2),
    )
    sparse = fields.get("moe_layer_freq", [1] * layers)
    if list(sparse if isinstance(sparse, list) else [sparse] * layers) != [1] * layers:
        raise UnsupportedError(f"this LLaDA-MoE checkpoint has dense layers, moe_layer_freq = {sparse}: not supported")
    # Shared experts have tensors of their own, which would be unexpected.
    fields.ignore("dense_intermediate_size", "shared_expert_intermediate_size")
    fields.refuse_unread()
