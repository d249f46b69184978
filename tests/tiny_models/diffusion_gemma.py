"""A tiny random DiffusionGemma: an encoder and a decoder with their weights in common, experts, and local layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig
from transformers.models.gemma4 import Gemma4VisionConfig

CANVAS = 4


def diffusion_gemma(**changed: Any) -> DiffusionGemmaForBlockDiffusion:
    """The model in float64, whose norms and routers transformers computes in float32."""
    sizes: dict[str, Any] = {
        "vocab_size": 29, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 3, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": 12, "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 5,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8, "final_logit_softcapping": 3.0,
        "max_position_embeddings": 64,
    }  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=8, patch_size=4, position_embedding_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(
        text_config=DiffusionGemmaTextConfig(**sizes | changed), vision_config=vision, canvas_length=CANVAS
    )
    model = DiffusionGemmaForBlockDiffusion(config).double().eval()
    model.set_experts_implementation("eager")
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return model
