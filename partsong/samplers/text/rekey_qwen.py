"""Loads Dream and Fast-dLLM v2 as a stock Qwen2, SDAR as a stock Qwen3 or Qwen3-MoE: the names are the same already.

They differ in the order of attention and the shift, which belong to the decoder and not to the weights. Sources:
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

from partsong.samplers.text.rekey import (
    Fields,
    Rekeying,
    expert_layers,
    outer_weights,
    same_names,
    shared_settings,
    stock_layer,
)

__all__ = ["dream", "fast_dllm_v2", "sdar"]


def dream(config: Mapping[str, Any]) -> Rekeying:
    """Maps Dream 7B (and DiffuCoder, which has its architecture) onto Qwen2; errors as in `Loader`."""
    fields = Fields(config, "Dream")
    # The class's own default of attention_bias is False and its projections have biases all the same.
    fields.ignore("attention_bias", "mrope_section")
    fields.allow_only(mlp_bias=False, use_mrope=False, is_causal=False)
    return _dense(fields, Qwen2Config, Qwen2ForCausalLM)


def fast_dllm_v2(config: Mapping[str, Any]) -> Rekeying:
    """Maps Fast-dLLM v2 1.5B and 7B onto Qwen2; errors as in `Loader`."""
    fields = Fields(config, "Fast-dLLM v2")
    fields.ignore("bd_size")
    return _dense(fields, Qwen2Config, Qwen2ForCausalLM)


def sdar(config: Mapping[str, Any]) -> Rekeying:
    """Maps SDAR, dense or a mixture of experts, onto Qwen3; errors as in `Loader`."""
    fields = Fields(config, "SDAR")
    fields.ignore(
        "block_size", "fuse_cross_entropy", "debug", "ep_size", "micro_forward", "skip_checkpoint", "use_deepep"
    )
    fields.ignore("block_length", "save_attention", "fuse_linear_cross_entropy", "use_l2warp")
    fields.allow_only(attention_bias=False)
    if config.get("num_experts") is None:
        return _dense(fields, Qwen3Config, Qwen3ForCausalLM, norms=True)
    return _mixture(fields)


def _qwen_settings(fields: Fields) -> dict[str, Any]:
    """Reads the settings that all these configurations share."""
    fields.allow_only(use_sliding_window=False, layer_types=(["full_attention"] * fields.need("num_hidden_layers"),))
    fields.ignore("sliding_window", "max_window_layers")
    most_positions = fields.get("max_position_embeddings", 32768)
    return shared_settings(fields) | {"max_position_embeddings": most_positions, "use_sliding_window": False}


def _dense(
    fields: Fields, config_class: type[PretrainedConfig], model_class: type[PreTrainedModel], *, norms: bool = False
) -> Rekeying:
    shared = _qwen_settings(fields)
    if norms:
        shared["head_dim"] = fields.need("head_dim")
    else:
        fields.allow_only(head_dim=shared["hidden_size"] // shared["num_attention_heads"])
    stock = config_class(**shared, **{"intermediate_size": fields.need("intermediate_size")})
    fields.refuse_unread()
    places = outer_weights(shared["tie_word_embeddings"])
    for layer in range(shared["num_hidden_layers"]):
        places |= same_names(stock_layer(f"model.layers.{layer}.", norms=norms, bias="" if norms else "qkv"))
    return Rekeying(model_class=model_class, config=stock, places=places)


def _mixture(fields: Fields) -> Rekeying:
    shared = _qwen_settings(fields)
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
    places = outer_weights(shared["tie_word_embeddings"]) | expert_layers(shared["num_hidden_layers"], count, inner)
    return Rekeying(model_class=Qwen3MoeForCausalLM, config=stock, places=places)
