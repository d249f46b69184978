"""Tiny random models of families that have modular pipelines only, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import Flux3Transformer2DModel, MiniMaxH3Transformer3DModel, MiniMaxMusic3Transformer1DModel


def flux3(side: int, **changed: Any) -> Any:
    settings = {
        "in_channels": 4,
        "cond_in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "joint_attention_dim": 12,
        "timestep_channels": 8,
        "mlp_ratio": 2.0,
        "axes_dims_rope": (2, 2, 2, 2),
    }
    return Flux3Transformer2DModel(**settings | changed)


def flux3_inputs(side: int, batch: int) -> dict[str, Any]:
    tokens, text = side * side // 4 + 1, 5 + side % 4
    ids, words = torch.zeros(tokens, 4), torch.zeros(text, 4)
    ids[:, 1], ids[:, 2], words[:, 3] = torch.arange(tokens) // side, torch.arange(tokens) % side, torch.arange(text)
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": words,
    }


def flux3_map(side: int) -> Any:
    return flux3(side, flow_map=True)


def flux3_map_inputs(side: int, batch: int) -> dict[str, Any]:
    return flux3_inputs(side, batch) | {"target_timestep": torch.full((batch,), 0.25)}


def minimax_h3(side: int) -> Any:
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        hidden_size=20,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=16,
        in_channels=2,
        audio_in_channels=3,
        text_dim=12,
        freq_dim=8,
        time_embed_hidden_dim=12,
        time_embed_dim=10,
        rope_freq_dim=1,
    )


def minimax_h3_inputs(side: int, batch: int) -> dict[str, Any]:
    """A picture to go by, words, sounds, and two frames that are made; sounds and frames have times of their own."""
    frame = side * side // 4
    tags = torch.tensor([0] * 3 + [1] * 7 + [2] * 5 + [0] * 2 * frame)
    return {
        "hidden_states": torch.randn(batch, 3 + 2 * frame, 8),
        "audio_hidden_states": torch.randn(batch, 5, 3),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "timestep": torch.tensor([0.5, 0.25, 0.0]),
        "timestep_indices": torch.tensor([2] * 10 + [1] * 5 + [0] * 2 * frame),
        "token_tags": tags,
        "position_ids": torch.arange(3 * len(tags)).view(-1, 3) % 7,
        "video_indices": (tags == 0).nonzero()[:, 0],
        "audio_indices": (tags == 2).nonzero()[:, 0],
        "text_indices": (tags == 1).nonzero()[:, 0],
    }


def minimax_music(side: int) -> Any:
    return MiniMaxMusic3Transformer1DModel(
        in_channels=4,
        condition_dim=6,
        num_layers=2,
        num_attention_heads=3,
        attention_head_dim=8,
        ff_inner_dim=16,
        rotary_dim=4,
        fourier_embedding_dim=8,
    )


def minimax_music_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, 2 * side),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": torch.randn(batch, 2 * side, 6),
    }


#: Name -> how to build the model, its inputs, and what a scheduler's timestep is divided by.
NEWER = {
    "Flux 3": (flux3, flux3_inputs, 1000),
    "Flux 3 flow map": (flux3_map, flux3_map_inputs, 1000),
    "MiniMax-H3": (minimax_h3, minimax_h3_inputs, 1000),
    "MiniMax Music 3": (minimax_music, minimax_music_inputs, 1000),
}
