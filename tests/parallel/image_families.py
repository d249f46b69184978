"""Tiny random models of further image families and the inputs to call them with."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    Flux2Transformer2DModel,
    HunyuanDiT2DModel,
    Lumina2Transformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0

from tests.tiny_models.weights import KeepPrecision


def flux2(side: int, in_channels: int = 4, *, guidance_embeds: bool = True) -> Any:
    return Flux2Transformer2DModel(
        in_channels=in_channels,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=12,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=guidance_embeds,
    )


def flux2_inputs(side: int, batch: int) -> dict[str, Any]:
    tokens, text = side * side // 4, 5 + side % 4
    ids = torch.zeros(tokens, 4)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // side, torch.arange(tokens) % side
    words = torch.zeros(batch, text, 4)
    words[..., 3] = torch.arange(text)
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "timestep": torch.full((batch,), 0.5),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": ids,  # the model takes them with and without a batch
        "txt_ids": words,
    }


def qwen_image(side: int, kind: Any = QwenImageTransformer2DModel, **changed: Any) -> Any:
    settings = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "joint_attention_dim": 12,
        "axes_dims_rope": (2, 2, 4),
    }
    return kind(**settings | changed)


def qwen_image_inputs(side: int, batch: int) -> dict[str, Any]:
    rows, width, text = side // 2, side // 2 + 2, 7
    mask = torch.ones(batch, text)
    mask[-1, 4:] = 0
    return {
        "hidden_states": torch.randn(batch, rows * width, 16),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, rows, width)]],  # as its pipeline makes it for several pictures of a prompt
    }


class _Exact(SanaLinearAttnProcessor2_0):
    """Sana's processor without its cast to float32, so that float64 can show that the sum over ranks is exact."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with KeepPrecision():
            return super().__call__(*args, **kwargs)


def sana(side: int, **more: Any) -> Any:
    return sana_like(SanaTransformer2DModel, side, num_layers=2, qk_norm="rms_norm_across_heads", **more)


def sana_like(kind: Any, side: int, **more: Any) -> Any:
    model = kind(
        in_channels=4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=8,
        num_cross_attention_heads=3,
        cross_attention_head_dim=8,
        cross_attention_dim=24,
        caption_channels=12,
        mlp_ratio=2.0,
        sample_size=side,
        **more,
    )
    for block in model.transformer_blocks:
        block.attn1.set_processor(_Exact())
    return model


def sana_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7)
    keep[:, 5:] = 0
    return {
        "hidden_states": torch.randn(batch, 4, side, side + 1),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_attention_mask": keep,
        "timestep": torch.full((batch,), 500),
    }


def hunyuan_dit(side: int, kind: Any = HunyuanDiT2DModel, **more: Any) -> Any:
    # It computes activations in float32 whatever its type, and torch rounds those of a vector's rest otherwise: with
    # widths of whole vectors, a batch of one is the same as a row of a batch of two to the last bit.
    return kind(
        num_attention_heads=3,
        attention_head_dim=32,
        in_channels=4,
        patch_size=2,
        sample_size=side,
        hidden_size=96,
        cross_attention_dim=12,
        cross_attention_dim_t5=16,
        pooled_projection_dim=10,
        text_len=5,
        text_len_t5=6,
        use_style_cond_and_image_meta_size=False,
        **more or {"num_layers": 4},
    )


def hunyuan_dit_inputs(side: int, batch: int) -> dict[str, Any]:
    angles = torch.randn(side * side // 4, 32)
    keep = torch.ones(batch, 5)
    keep[:, 3:] = 0
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, 5, 12),
        "text_embedding_mask": keep,
        "encoder_hidden_states_t5": torch.randn(batch, 6, 16),
        "text_embedding_mask_t5": torch.ones(batch, 6),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def lumina2(side: int) -> Any:
    return Lumina2Transformer2DModel(
        sample_size=side,
        in_channels=4,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=6,
        num_kv_heads=3,
        multiple_of=8,
        axes_dim_rope=(2, 2, 4),
        axes_lens=(30, 32, 32),
        cap_feat_dim=12,
    )


def lumina2_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7, dtype=torch.int64)
    keep[-1, 4:] = 0  # texts of several lengths: the sequences they are joined in are padded and masked
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_attention_mask": keep,
    }


def aura_flow(side: int, num_single_dit_layers: int = 2) -> Any:
    return AuraFlowTransformer2DModel(
        sample_size=side,
        num_mmdit_layers=1,
        num_single_dit_layers=num_single_dit_layers,
        attention_head_dim=8,
        num_attention_heads=3,
        joint_attention_dim=12,
        caption_projection_dim=24,
        pos_embed_max_size=256,
    )


def aura_flow_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "encoder_hidden_states": torch.randn(batch, 5, 12),
        "timestep": torch.full((batch,), 0.5),
    }


def z_image(side: int, **changed: Any) -> Any:
    settings = {
        "in_channels": 4,
        "dim": 24,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 3,
        "n_kv_heads": 3,
        "cap_feat_dim": 12,
        "axes_dims": [2, 2, 4],
        "axes_lens": [128, 32, 32],
    }
    return ZImageTransformer2DModel(**settings | changed)


def z_image_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "x": [torch.randn(4, 1, side, side) for _ in range(batch)],
        "t": torch.full((batch,), 0.5),
        "cap_feats": [torch.randn(5 + 35 * index, 12) for index in range(batch)],
    }
