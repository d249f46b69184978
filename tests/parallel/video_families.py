"""Tiny random video models and the inputs to call them with: three frames, so that four ranks have fewer each."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    LatteTransformer3DModel,
    LTXVideoTransformer3DModel,
    MochiTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed

FRAMES = 3
HEADS = {"num_attention_heads": 3, "attention_head_dim": 8}
CHANNELS = {"in_channels": 4, "out_channels": 4}


def video(side: int, batch: int, frames: int = FRAMES) -> torch.Tensor:
    return torch.randn(batch, 4, frames, side, side)


def kept(batch: int) -> torch.Tensor:
    """A mask of texts of seven words: the last one has four."""
    mask = torch.ones(batch, 7)
    mask[-1, 4:] = 0
    return mask


def wan_like(kind: Any, **changed: Any) -> Any:
    settings = {
        "patch_size": (1, 2, 2),
        **HEADS,
        **CHANNELS,
        "text_dim": 12,
        "freq_dim": 8,
        "ffn_dim": 32,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }
    return kind(**settings | changed)


def wan(side: int) -> Any:
    return wan_like(WanTransformer3DModel)


def wan_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": video(side, batch),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "timestep": torch.full((batch,), 500.0),
    }


def wan_tokens_inputs(side: int, batch: int) -> dict[str, Any]:
    """A timestep per token, as where the first frame is given."""
    tokens = FRAMES * (side // 2) ** 2
    return {**wan_inputs(side, batch), "timestep": torch.linspace(500.0, 100.0, tokens).expand(batch, -1)}


def skyreels(side: int) -> Any:
    return wan_like(SkyReelsV2Transformer3DModel)


def skyreels_forcing_inputs(side: int, batch: int) -> dict[str, Any]:
    """A timestep per frame."""
    times = torch.linspace(500.0, 300.0, FRAMES).expand(batch, -1)
    return {**wan_inputs(side, batch), "timestep": times, "enable_diffusion_forcing": True}


def ltx(side: int, kind: Any = LTXVideoTransformer3DModel, **changed: Any) -> Any:
    settings = {
        **HEADS,
        **CHANNELS,
        "cross_attention_dim": 24,
        "num_layers": 2,
        "caption_channels": 12,
        "norm_elementwise_affine": True,
    }
    return kind(**settings | changed)


def ltx_inputs(side: int, batch: int) -> dict[str, Any]:
    width = side // 2 + 1
    return {
        "hidden_states": torch.randn(batch, FRAMES * (side // 2) * width, 4),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_attention_mask": kept(batch),
        "timestep": torch.full((batch,), 500.0),
        "num_frames": FRAMES,
        "height": side // 2,
        "width": width,
        "rope_interpolation_scale": (0.3, 32.0, 32.0),
    }


def ltx_tokens_inputs(side: int, batch: int) -> dict[str, Any]:
    """A timestep per token, as where the first frame is given, and coordinates per token."""
    named = ltx_inputs(side, batch)
    tokens = named["hidden_states"].shape[1]
    times = torch.linspace(500.0, 100.0, tokens).expand(batch, -1)
    return {**named, "timestep": times, "video_coords": torch.rand(batch, 3, tokens) * 20}


def cogvideox(side: int, kind: Any = CogVideoXTransformer3DModel, **changed: Any) -> Any:
    settings = {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        **CHANNELS,
        "time_embed_dim": 8,
        "text_embed_dim": 12,
        "num_layers": 2,
        "sample_width": side,
        "sample_height": side,
        "sample_frames": 4 * (FRAMES - 1) + 1,
        "max_text_seq_length": 7,
    }
    return kind(**settings | changed)


def cogvideox_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, FRAMES, 4, side, side),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "timestep": torch.full((batch,), 500.0),
    }


def cogvideox_rotary(side: int) -> Any:
    return cogvideox(side, use_rotary_positional_embeddings=True, ofs_embed_dim=8)


def cogvideox_rotary_inputs(side: int, batch: int) -> dict[str, Any]:
    grid = (side // 2, side // 2)
    angles = get_3d_rotary_pos_embed(16, ((0, 0), grid), grid, FRAMES)
    return {**cogvideox_inputs(side, batch), "image_rotary_emb": angles, "ofs": torch.full((1,), 2.0)}


def hunyuan_video_like(kind: Any = HunyuanVideoTransformer3DModel, **changed: Any) -> Any:
    settings = {
        **HEADS,
        **CHANNELS,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 12,
        "pooled_projection_dim": 10,
        "rope_axes_dim": (4, 2, 2),
    }
    return kind(**settings | changed)


def hunyuan_video(side: int) -> Any:
    return hunyuan_video_like(guidance_embeds=True)


def hunyuan_video_first_frame(side: int) -> Any:
    return hunyuan_video_like(guidance_embeds=False, image_condition_type="token_replace")


def hunyuan_video_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        **wan_inputs(side, batch),
        "encoder_attention_mask": kept(batch),
        "pooled_projections": torch.randn(batch, 10),
        "guidance": torch.full((batch,), 6000.0),
    }


def mochi(side: int, num_layers: int = 2) -> Any:
    return MochiTransformer3DModel(
        **HEADS, **CHANNELS, num_layers=num_layers, pooled_projection_dim=12, text_embed_dim=16, time_embed_dim=8
    )


def mochi_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        **wan_inputs(side, batch),
        "encoder_hidden_states": torch.randn(batch, 7, 16),
        "encoder_attention_mask": kept(batch).bool(),
    }


def latte(side: int) -> Any:
    return LatteTransformer3DModel(
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=24,
        sample_size=side,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=12,
        video_length=FRAMES,
    )
