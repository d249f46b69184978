"""Loads LLaDA 2.0, 2.1 and 2.2 (arXiv 2512.15745) as a stock GLM-4 MoE.

The two compute the same: per-head norms of queries and keys, a rotation in halves of the first part of each head, a
sigmoid router whose choice, but not whose weights, sees a bias per expert and is confined to the best groups (by the
sum of their two best scores), weights renormalised and scaled, experts shared by all tokens, dense first layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from partsong.errors import ArgumentError, UnsupportedError
from partsong.samplers.text.rekey import Fields, Rekeying, WeightPlace, experts, new_names, same_names, shared_settings

__all__ = ["llada2"]


def llada2(config: Mapping[str, Any]) -> Rekeying:
    """Maps LLaDA 2.x onto GLM-4 MoE; errors as in `Loader`, and an ArgumentError for fields at odds."""
    fields = Fields(config, "LLaDA2")
    stock = _stock(fields)
    bias = fields.get("moe_router_enable_expert_bias", True)
    _check(fields)
    tied = stock.tie_word_embeddings
    places = new_names({"model.word_embeddings.weight": "model.embed_tokens.weight"})
    places |= same_names(["model.norm.weight", *([] if tied else ["lm_head.weight"])])
    zero = []
    for layer in range(stock.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        places |= _attention(prefix, stock)
        if layer < stock.first_k_dense_replace:
            places |= same_names(f"{prefix}mlp.{p}_proj.weight" for p in ("gate", "up", "down"))
            continue
        places |= same_names([f"{prefix}mlp.gate.weight"])
        places |= same_names(f"{prefix}mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up", "down"))
        inner = stock.moe_intermediate_size
        places |= experts(f"{prefix}mlp.experts.", stock.n_routed_experts, inner)
        correction = f"{prefix}mlp.gate.e_score_correction_bias"
        if bias:
            places |= new_names({f"{prefix}mlp.gate.expert_bias": correction})
        else:
            zero.append(correction)
    return Rekeying(model_class=Glm4MoeForCausalLM, config=stock, places=places, zero=tuple(zero))


def _attention(prefix: str, stock: Glm4MoeConfig) -> dict[str, tuple[WeightPlace, ...]]:
    """Cuts the fused projection, which holds all query heads, then all key heads, then all value heads."""
    heads, kv_heads, width = stock.num_attention_heads, stock.num_key_value_heads, stock.head_dim
    ends = [0, heads * width, (heads + kv_heads) * width, (heads + 2 * kv_heads) * width]
    places = same_names([f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"])
    for kind in ("weight", "bias") if stock.attention_bias else ("weight",):
        places[f"{prefix}attention.query_key_value.{kind}"] = tuple(
            WeightPlace(target=f"{prefix}self_attn.{p}_proj.{kind}", source=(ends[i], ends[i + 1]))
            for i, p in enumerate("qkv")
        )
    names = {"dense": "o_proj", "query_layernorm": "q_norm", "key_layernorm": "k_norm"}.items()
    return places | new_names({f"{prefix}attention.{a}.weight": f"{prefix}self_attn.{b}.weight" for a, b in names})


def _stock(fields: Fields) -> Glm4MoeConfig:
    shared, chosen = shared_settings(fields), fields.need("num_experts_per_tok")
    head_dim = fields.get("head_dim", shared["hidden_size"] // shared["num_attention_heads"])
    shared["rope_parameters"]["partial_rotary_factor"] = _rotary_share(fields, head_dim)
    stock = Glm4MoeConfig(
        intermediate_size=fields.need("intermediate_size"),
        max_position_embeddings=fields.get("max_position_embeddings", 16384),
        attention_bias=bool(fields.get("use_qkv_bias", False)),
        moe_intermediate_size=fields.need("moe_intermediate_size"),
        num_experts_per_tok=chosen,
        n_shared_experts=fields.need("num_shared_experts"),
        n_routed_experts=fields.need("num_experts"),
        routed_scaling_factor=float(fields.need("routed_scaling_factor")),
        n_group=fields.need("n_group"),
        topk_group=fields.need("topk_group"),
        first_k_dense_replace=fields.get("first_k_dense_replace", 0),
        # A single expert's weight is left as it is.
        norm_topk_prob=chosen > 1,
        use_qk_norm=True,
        num_mtp_layers=0,
        **shared,
    )
    stock.head_dim = head_dim
    return stock


def _rotary_share(fields: Fields, head_dim: int) -> float:
    """Returns the part of each head that is rotated."""
    factor, size = fields.need("partial_rotary_factor"), fields.get("rotary_dim")
    if size is not None and size != int(head_dim * factor):
        raise ArgumentError(
            f"a LLaDA2 configuration says rotary_dim = {size} and partial_rotary_factor = {factor} of {head_dim}, "
            f"which is {int(head_dim * factor)}: only one of them can be right"
        )
    return float(factor)


def _check(fields: Fields) -> None:
    fields.allow_only(
        norm_head=False,
        norm_softmax=False,
        norm_topk_prob=True,
        score_function="sigmoid",
        use_bias=False,
        use_qk_norm=True,
        use_rmsnorm=True,
        use_sliding_window=False,
        num_nextn_predict_layers=0,
    )
    if fields.get("num_shared_experts") < 1:
        raise UnsupportedError("this LLaDA2 checkpoint has num_shared_experts = 0, and GLM-4 MoE always has some")
    fields.ignore("embedding_dropout", "output_dropout", "sliding_window", "max_window_layers", "router_dtype")
    fields.ignore("moe_shared_expert_intermediate_size", "mtp_loss_scaling_factor")
    fields.refuse_unread()
