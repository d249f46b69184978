"""Tiny random models of newer image families whose blocks take text and picture side by side, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
    ChromaTransformer2DModel,
    CogView3PlusTransformer2DModel,
    CogView4Transformer2DModel,
    GlmImageTransformer2DModel,
    HunyuanImageTransformer2DModel,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
    LongCatImageTransformer2DModel,
    OvisImageTransformer2DModel,
)

_FLUX_LIKE = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "joint_attention_dim": 12,
    "axes_dims_rope": (2, 2, 4),
}
_COGVIEW = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "out_channels": 4,
    "text_embed_dim": 12,
    "time_embed_dim": 10,
    "condition_dim": 4,
}


def _flux_like_inputs(side: int, batch: int) -> dict[str, Any]:
    tokens, text = side * side // 4, 7
    ids = torch.zeros(tokens, 3)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // side, torch.arange(tokens) % side
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
    }


def chroma(side: int, **changed: Any) -> Any:
    approximator = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    return ChromaTransformer2DModel(**_FLUX_LIKE | approximator | changed)


def chroma_inputs(side: int, batch: int) -> dict[str, Any]:
    named = _flux_like_inputs(side, batch)
    mask = torch.ones(batch, 7 + side * side // 4)
    mask[-1, 4:7] = 0  # in the blocks it becomes a mask of queries and keys
    return {**named, "attention_mask": mask}


def bria(side: int, **changed: Any) -> Any:
    return BriaTransformer2DModel(**_FLUX_LIKE | {"axes_dims_rope": (0, 4, 4)} | changed)


def bria_inputs(side: int, batch: int) -> dict[str, Any]:
    return {**_flux_like_inputs(side, batch), "timestep": torch.full((batch,), 500.0)}


def fibo(side: int) -> Any:
    sizes = {"joint_attention_dim": 24, "axes_dims_rope": (0, 4, 4), "text_encoder_dim": 12}
    return BriaFiboTransformer2DModel(**_FLUX_LIKE | sizes)


def fibo_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7 + side * side // 4, dtype=torch.bool)
    keep[-1, 4:7] = False
    return {
        **bria_inputs(side, batch),
        "encoder_hidden_states": torch.randn(batch, 7, 24),
        "text_encoder_layers": [torch.randn(batch, 7, 12) for _ in range(2)],
        "joint_attention_kwargs": {"attention_mask": keep[:, None, None]},
    }


def ovis(side: int, channels: int = 4) -> Any:
    return OvisImageTransformer2DModel(**_FLUX_LIKE | {"in_channels": channels, "out_channels": channels})


def longcat(side: int, **changed: Any) -> Any:
    return LongCatImageTransformer2DModel(**_FLUX_LIKE | changed, pooled_projection_dim=10)


def hunyuan_image(side: int, **changed: Any) -> Any:
    settings = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 3,
        "attention_head_dim": 8,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": (2, 2),
        "text_embed_dim": 12,
        "text_embed_2_dim": 10,
        "rope_axes_dim": (4, 4),
    }
    return HunyuanImageTransformer2DModel(**settings | changed)


def hunyuan_image_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7, dtype=torch.int64)
    keep[-1, 4:] = 0
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_attention_mask": keep,
        "encoder_hidden_states_2": torch.randn(batch, 4, 10),
        "encoder_attention_mask_2": keep[:, :4],
    }


def cogview3(side: int) -> Any:
    return CogView3PlusTransformer2DModel(**_COGVIEW, pos_embed_max_size=8, sample_size=8)


def cogview4(side: int, **changed: Any) -> Any:
    return CogView4Transformer2DModel(**_COGVIEW | changed, sample_size=8, rope_axes_dim=(8, 8))


def cogview_inputs(side: int, batch: int) -> dict[str, Any]:
    size = torch.tensor([[8.0 * side, 8.0 * side]]).repeat(batch, 1)
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "timestep": torch.full((batch,), 500.0),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros_like(size),
    }


def glm_image(side: int) -> Any:
    return GlmImageTransformer2DModel(**_COGVIEW, prior_vq_quantizer_codebook_size=32)


def glm_image_inputs(side: int, batch: int) -> dict[str, Any]:
    named = cogview_inputs(side, batch)
    del named["original_size"]
    ids = torch.arange(batch * side * side // 4).view(batch, -1) % 32
    return {**named, "prior_token_id": ids, "prior_token_drop": ids > 28}


def joy(side: int) -> Any:
    return JoyImageEditTransformer3DModel(**_joy())


def joy_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, 1, side, side),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
    }


def joy_plus(side: int) -> Any:
    return JoyImageEditPlusTransformer3DModel(**_joy())


def joy_plus_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7, dtype=torch.int64)
    keep[-1, 4:] = 0
    grid = (1, side // 2, side // 2)
    return {
        "hidden_states": torch.randn(batch, side * side // 4 + 4, 4, 1, 2, 2),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_hidden_states_mask": keep,
        "shape_list": [[grid, (1, 2, 2)], [grid]][:batch],
    }


def _joy() -> dict[str, Any]:
    return {
        "patch_size": [1, 2, 2],
        "in_channels": 4,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "text_dim": 12,
        "mlp_width_ratio": 2.0,
        "num_layers": 2,
        "rope_dim_list": [2, 2, 4],
    }


#: Name -> how to build the model, its inputs, and what a scheduler's timestep is divided by.
PAIRS = {
    "Chroma": (chroma, chroma_inputs, 1000),
    "Bria": (bria, bria_inputs, 1),
    "Bria FIBO": (fibo, fibo_inputs, 1),
    "Ovis-Image": (ovis, _flux_like_inputs, 1000),
    "LongCat-Image": (longcat, _flux_like_inputs, 1000),
    "HunyuanImage": (hunyuan_image, hunyuan_image_inputs, 1),
    "CogView3": (cogview3, cogview_inputs, 1),
    "CogView4": (cogview4, cogview_inputs, 1),
    "GLM-Image": (glm_image, glm_image_inputs, 1),
    "JoyImage": (joy, joy_inputs, 1),
    "JoyImage Plus": (joy_plus, joy_plus_inputs, 1),
}
