"""Tiny random models of newer image families that put text and picture in one sequence, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    BriaFibo2Transformer2DModel,
    ErnieImageTransformer2DModel,
    Ideogram4Transformer2DModel,
    Krea2Transformer2DModel,
    NucleusMoEImageTransformer2DModel,
    OmniGenTransformer2DModel,
    PRXTransformer2DModel,
)


def krea2(side: int, in_channels: int = 4) -> Any:
    return Krea2Transformer2DModel(
        in_channels=in_channels,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=12,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(2, 2, 4),
    )


def krea2_inputs(side: int, batch: int) -> dict[str, Any]:
    tokens = side * side // 4
    keep = torch.ones(batch, 7, dtype=torch.bool)
    keep[-1, 4:] = False
    places = torch.zeros(7 + tokens, 3)
    places[7:, 1], places[7:, 2] = torch.arange(tokens) // side, torch.arange(tokens) % side
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, 7, 3, 12),
        "timestep": torch.full((batch,), 0.5),
        "position_ids": places,
        "encoder_attention_mask": keep,
    }


def ernie(side: int, channels: int = 4) -> Any:
    return ErnieImageTransformer2DModel(
        hidden_size=24,
        num_attention_heads=3,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=channels,
        out_channels=channels,
        text_in_dim=12,
        rope_axes_dim=(2, 2, 4),
    )


def ernie_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, side // 2, side // 2),
        "timestep": torch.full((batch,), 500.0),
        "text_bth": torch.randn(batch, 7, 12),
        "text_lens": torch.tensor([7, 4])[:batch],
    }


def ideogram4(side: int, in_channels: int = 4, llm_features_dim: int = 12) -> Any:
    return Ideogram4Transformer2DModel(
        in_channels=in_channels,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        intermediate_size=16,
        adaln_dim=8,
        llm_features_dim=llm_features_dim,
        mrope_section=(2, 1, 1),
    )


def ideogram4_inputs(side: int, batch: int) -> dict[str, Any]:
    total = 7 + side * side // 4
    roles, segments = torch.full((batch, total), 2), torch.ones(batch, total, dtype=torch.int64)
    roles[:, :7] = 3
    segments[-1, :3] = -1  # padding attends to padding only
    return {
        "hidden_states": torch.randn(batch, total, 4),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": torch.randn(batch, total, 12),
        "position_ids": torch.arange(total)[None, :, None].repeat(batch, 1, 3),
        "segment_ids": segments,
        "indicator": roles,
    }


def fibo2(side: int) -> Any:
    return BriaFibo2Transformer2DModel(
        in_channels=4,
        dim=24,
        n_layers=2,
        n_heads=3,
        n_refiner_layers=1,
        cap_feat_dim=12,
        axes_dims=(2, 2, 4),
        axes_lens=(64, 32, 32),
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=3,
        max_num_gist_tokens=5,
        gist_step=1,
        gist_min_text_len=2,
        gist_max_text_len=8,
    )


def fibo2_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": torch.randn(batch, 2, 7, 12),
        "context_latents": [torch.randn(batch, 4, 4, 4)],
    }


def omnigen(side: int) -> Any:
    return OmniGenTransformer2DModel(
        in_channels=4,
        hidden_size=24,
        num_attention_heads=3,
        num_key_value_heads=3,
        intermediate_size=32,
        num_layers=2,
        pad_token_id=0,
        vocab_size=64,
        rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
        pos_embed_max_size=16,
        time_step_dim=8,
    )


def omnigen_inputs(side: int, batch: int) -> dict[str, Any]:
    total = 7 + 1 + side * side // 4
    sees = torch.ones(batch, total, total)
    sees[:, :8, :8] = torch.ones(8, 8).tril()  # words see the words before them, the picture sees all
    sees[:, :8, 8:] = 0
    places = torch.arange(total).repeat(batch, 1)
    sees[0, 2:, :2] = 0  # the first text has two tokens of padding, and all samples are turned by its positions
    places[0] = (places[0] - 2).clamp(min=0)
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "timestep": torch.full((batch,), 0.5),
        "input_ids": torch.arange(batch * 7).view(batch, 7) + 1,
        "input_img_latents": [torch.randn(1, 4, 4, 4)],
        "input_image_sizes": {batch - 1: [[2, 6]]},  # the last sample is given a picture
        "attention_mask": sees,
        "position_ids": places,
    }


def prx(side: int, in_channels: int = 4) -> Any:
    return PRXTransformer2DModel(
        in_channels=in_channels, patch_size=2, context_in_dim=12, hidden_size=24, num_heads=3, depth=2, axes_dim=[4, 4]
    )


def prx_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7, dtype=torch.bool)
    keep[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "attention_mask": keep,
    }


def nucleus(side: int, in_channels: int = 4) -> Any:
    return NucleusMoEImageTransformer2DModel(
        patch_size=2,
        in_channels=in_channels,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(2, 2, 4),
        mlp_ratio=8.0,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=8,
        capacity_factors=2.0,
    )


def nucleus_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7, dtype=torch.bool)
    keep[-1, 4:] = False
    return {
        "hidden_states": torch.randn(batch, side * side // 4, 4),
        "img_shapes": [(1, side // 2, side // 2)] * batch,
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_hidden_states_mask": keep,
        "timestep": torch.full((batch,), 0.5),
    }


#: Name -> how to build the model, its inputs, and what a scheduler's timestep is divided by.
SEQUENCES = {
    "Krea 2": (krea2, krea2_inputs, 1000),
    "ERNIE-Image": (ernie, ernie_inputs, 1),
    "Ideogram 4": (ideogram4, ideogram4_inputs, 1000),
    "Bria FIBO 2": (fibo2, fibo2_inputs, 1000),
    "OmniGen": (omnigen, omnigen_inputs, 1000),
    "PRX": (prx, prx_inputs, 1000),
    "Nucleus-Image": (nucleus, nucleus_inputs, 1000),
}
