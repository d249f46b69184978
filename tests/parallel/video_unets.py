"""Tiny UNets that make videos, and the inputs to call them with: rows of their frames are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import UNet3DConditionModel, UNetMotionModel, UNetSpatioTemporalConditionModel
from peft import LoraConfig, inject_adapter_in_model

#: Frames of a video, and width of its text.
FRAMES, WIDTH = 3, 12


def motion(**changed: Any) -> UNetMotionModel:
    """AnimateDiff's."""
    settings = {
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlockMotion", "CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion", "CrossAttnUpBlockMotion"),
        "cross_attention_dim": WIDTH,
        "num_attention_heads": 2,
        "norm_num_groups": 4,
        "motion_num_attention_heads": 2,
        "motion_max_seq_length": FRAMES,
    }
    return UNetMotionModel(**settings | changed)


def three_d(**changed: Any) -> UNet3DConditionModel:
    """Of text-to-video."""
    settings = {
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock3D", "CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D", "CrossAttnUpBlock3D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return UNet3DConditionModel(**settings | changed)


def three_d_lora() -> Any:
    """With a LoRA on convolutions over rows and on those over time."""
    config = LoraConfig(r=2, target_modules=["to_q", "conv_in", "resnets.0.conv1", "conv1.2"])
    return inject_adapter_in_model(config, three_d())


def spatio_temporal(in_channels: int = 4) -> UNetSpatioTemporalConditionModel:
    """Of Stable Video Diffusion."""
    return UNetSpatioTemporalConditionModel(
        in_channels=in_channels,
        out_channels=4,
        block_out_channels=(32, 64),  # its norms have 32 groups
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=12,
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        num_attention_heads=(2, 2),
        num_frames=FRAMES,
    )


def motion_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    """The text of each frame by itself, as AnimateDiff's pipelines pass it."""
    return {
        "sample": torch.randn(batch, 4, FRAMES, height, width),
        "encoder_hidden_states": torch.randn(batch * FRAMES, 5, WIDTH),
    }


def three_d_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    """One text for all frames of a video."""
    text = torch.randn(batch, 5, WIDTH)
    return motion_inputs(height, width, batch) | {"encoder_hidden_states": text}


def spatio_temporal_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    """A picture's embedding, and frames before channels."""
    return {
        "sample": torch.randn(batch, FRAMES, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, 1, WIDTH),
        "added_time_ids": torch.rand(batch, 3),
    }


def with_residuals(inputs: Callable[[int, int, int], dict[str, Any]]) -> Callable[[int, int, int], dict[str, Any]]:
    """What a ControlNet adds at each of three levels, frames folded into the batch."""

    def make(height: int, width: int, batch: int) -> dict[str, Any]:
        sizes = [(height, width)]
        for _ in range(2):
            sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
        places = [(8, 0), (8, 0), (8, 1), (16, 1), (16, 2), (16, 2)]
        rows = batch * FRAMES
        return inputs(height, width, batch) | {
            "down_block_additional_residuals": tuple(torch.randn(rows, c, *sizes[level]) for c, level in places),
            "mid_block_additional_residual": torch.randn(rows, 16, *sizes[2]),
        }

    return make
