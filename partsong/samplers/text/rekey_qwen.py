"""Loads Dream and Fast-dLLM v2 as a stock Qwen2, SDAR as a stock Qwen3 or Qwen3-MoE: the names are the same already.

What sets them apart, the order of attention and the shift, is the decoder's business and not in the weights. Sources:
Dream arXiv 2508.15487, Fast-dLLM v2 arXiv 2509.26328, SDAR arXiv 2510.06303.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from partsong.samplers.text.rekey import Fields, Rekeying, WeightPlace, experts, same_names, stock_layer

__all__ = ["dream", "fast_dllm_v2", "sdar"]


def dream(config: Mapping[str, Any]) -> Rekeying:
    """Maps Dream 7B (and DiffuCoder, which has its architecture) onto Qwen2.

    Args:
        config: the fields of ``config.json``.

    Raises:
        UnsupportedError: a field with a value that Qwen2 does not compute, or an unknown one.
        ArgumentError: a field is missing.
    """
    fields = Fields(config, "Dream")
    # The class's own default of attention_bias is False and its projections have biases all the same.
    fields.ignore("attention_bias", "mrope_section")
    fields.allow_only(mlp_bias=False, use_mrope=False, is_causal=False)
    return _dense(fields, Qwen2Config, Qwen2ForCausalLM)


def fast_dllm_v2(config: Mapping[str, Any]) -> Rekeying:
    """Maps Fast-dLLM v2 1.5B and 7B onto Qwen2; arguments and errors as in `dream`."""
    fields = Fields(config, "Fast-dLLM v2")
    fields.ignore("bd_size")
    return _dense(fields, Qwen2Config, Qwen2ForCausalLM)


def sdar(config: Mapping[str, Any]) -> Rekeying:
    """Maps SDAR, dense or a mixture of experts, onto Qwen3; arguments and errors as in `dream`."""
    fields = Fields(config, "SDAR")
    fields.ignore(
        "block_size", "fuse_cross_entropy", "debug", "ep_size", "micro_forward", "skip_checkpoint", "use_deepep"
    )
    fields.ignore("block_length", "save_attention", "fuse_linear_cross_entropy", "use_l2warp")
    fields.allow_only(attention_bias=False)
    if config.get("num_experts") is None:
        return _dense(fields, Qwen3Config, Qwen3ForCausalLM, norms=True)
    return _mixture(fields)


def _shared_settings(fields: Fields) -> dict[str, Any]:
    """Reads what all these configurations have."""
    heads = fields.need("num_attention_heads")
    fields.allow_only(use_sliding_window=False, layer_types=(["full_attention"] * fields.need("num_hidden_layers"),))
    fields.ignore("sliding_window", "max_window_layers")
    return {
        "vocab_size": fields.need("vocab_size"),
        "hidden_size": fields.need("hidden_size"),
        "num_hidden_layers": fields.need("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("num_key_value_heads", heads),
        "hidden_act": fields.get("hidden_act", "silu"),
        "max_position_embeddings": fields.get("max_position_embeddings", 32768),
        "rms_norm_eps": fields.need("rms_norm_eps"),
        "rope_parameters": fields.rotary(),
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "use_sliding_window": False,
        "eos_token_id": fields.get("eos_token_id"),
    }


def _outer_weights(tied: bool) -> dict[str, tuple[WeightPlace, ...]]:
    return same_names(["model.embed_tokens.weight", "model.norm.weight", *([] if tied else ["lm_head.weight"])])


def _dense(
    fields: Fields, config_class: type[PretrainedConfig], model_class: type[PreTrainedModel], *, norms: bool = False
) -> Rekeying:
    shared = _shared_settings(fields)
    if norms:
        shared["head_dim"] = fields.need("head_dim")
    else:
        fields.allow_only(head_dim=shared["hidden_size"] // shared["num_attention_heads"])
    stock = config_class(**shared, **{"intermediate_size": fields.need("intermediate_size")})
    fields.refuse_unread()
    places = _outer_weights(shared["tie_word_embeddings"])
    for layer in range(shared["num_hidden_layers"]):
        places |= same_names(stock_layer(f"model.layers.{layer}.", norms=norms, bias="" if norms else "qkv"))
    return Rekeying(model_class=model_class, config=stock, places=places)


def _mixture(fields: Fields) -> Rekeying:
    shared = _shared_settings(fields)
    fields.allow_only(decoder_sparse_step=1, mlp_only_layers=([],))
    fields.ignore("intermediate_size")
    count, inner = fields.need("num_experts"), fields.need("moe_intermediate_size")
    stock = Qwen3MoeConfig(
        num_experts=count,
        moe_intermediate_size=inner,
        num_experts_per_tok=fields.need("num_experts_per_tok"),
        norm_topk_prob=bool(fields.need("norm_topk_prob")),
        **shared,
        **{"head_dim": fields.need("head_dim")},
    )
    fields.refuse_unread()
    places = _outer_weights(shared["tie_word_embeddings"])
    for layer in range(shared["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        places |= same_names([*stock_layer(prefix, norms=True, mlp=False), f"{prefix}mlp.gate.weight"])
        places |= experts(f"{prefix}mlp.experts.", f"{prefix}mlp.experts.", count, inner)
    return Rekeying(model_class=Qwen3MoeForCausalLM, config=stock, places=places)
