"""More tiny random video models, and those of sound, with the inputs to call them with."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AllegroTransformer3DModel,
    AnyFlowTransformer3DModel,
    ChronoEditTransformer3DModel,
    ConsisIDTransformer3DModel,
    CosmosTransformer3DModel,
    EasyAnimateTransformer3DModel,
    HeliosTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    Kandinsky5Transformer3DModel,
    LongCatAudioDiTTransformer,
    StableAudio3DiTModel,
    StableAudioDiTModel,
    WanVACETransformer3DModel,
)

from tests.parallel.video_families import (
    CHANNELS,
    FRAMES,
    HEADS,
    cogvideox,
    cogvideox_rotary_inputs,
    kept,
    video,
    wan_inputs,
    wan_like,
)


def wan_vace(side: int) -> Any:
    return wan_like(WanVACETransformer3DModel, vace_layers=[0, 1], vace_in_channels=6)


def wan_vace_inputs(side: int, batch: int) -> dict[str, Any]:
    control = torch.randn(batch, 6, FRAMES, side, side)
    return {
        **wan_inputs(side, batch),
        "control_hidden_states": control,
        "control_hidden_states_scale": torch.tensor([1.0, 0.5]),
    }


def consis_id(side: int, **changed: Any) -> Any:
    face = {
        "LFE_id_dim": 12,
        "LFE_vit_dim": 12,
        "LFE_depth": 1,
        "LFE_dim_head": 4,
        "LFE_num_heads": 3,
        "LFE_ff_mult": 1,
    }
    few = {"LFE_num_id_token": 2, "LFE_num_querie": 3, "LFE_output_dim": 32, "LFE_num_scale": 1}
    return cogvideox(
        side,
        ConsisIDTransformer3DModel,
        is_train_face=True,
        cross_attn_dim_head=8,
        cross_attn_num_heads=3,
        **face,
        **few,
        **{"use_rotary_positional_embeddings": True, **changed},
    )


def consis_id_inputs(side: int, batch: int) -> dict[str, Any]:
    face = {"id_cond": torch.randn(batch, 12), "id_vit_hidden": [torch.randn(batch, 5, 12)]}
    return {name: value for name, value in cogvideox_rotary_inputs(side, batch).items() if name != "ofs"} | face


def chrono_edit(side: int) -> Any:
    return wan_like(ChronoEditTransformer3DModel)


def cosmos(side: int, **changed: Any) -> Any:
    settings = {
        **CHANNELS,
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "num_layers": 2,
        "mlp_ratio": 2,
        "text_embed_dim": 12,
        "adaln_lora_dim": 4,
        "max_size": (4, 32, 32),
        "concat_padding_mask": False,
        "extra_pos_embed_type": None,
    }
    return CosmosTransformer3DModel(**settings | changed)


def cosmos_frames_inputs(side: int, batch: int) -> dict[str, Any]:
    """A timestep per frame."""
    times = torch.linspace(0.5, 0.3, FRAMES).view(1, 1, FRAMES, 1, 1).expand(batch, -1, -1, -1, -1)
    return {**wan_inputs(side, batch), "timestep": times.contiguous(), "fps": 16}


def hunyuan_video_15(side: int, **changed: Any) -> Any:
    settings = {
        **HEADS,
        **CHANNELS,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "text_embed_dim": 12,
        "text_embed_2_dim": 6,
        "image_embed_dim": 8,
        "patch_size": 2,
        "rope_axes_dim": (4, 2, 2),
    }
    return HunyuanVideo15Transformer3DModel(**settings | changed)


def hunyuan_video_15_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        **wan_inputs(side, batch),
        "encoder_attention_mask": kept(batch).bool(),
        "encoder_hidden_states_2": torch.randn(batch, 7, 6),
        "encoder_attention_mask_2": kept(batch).bool(),
        "image_embeds": torch.randn(batch, 3, 8),
    }


def easy_animate(side: int, **changed: Any) -> Any:
    settings = {
        **CHANNELS,
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "patch_size": 2,
        "num_layers": 2,
        "mmdit_layers": 1,
        "time_embed_dim": 8,
        "text_embed_dim": 12,
    }
    return EasyAnimateTransformer3DModel(**settings | changed)


def helios(side: int) -> Any:
    return HeliosTransformer3DModel(
        **HEADS,
        **CHANNELS,
        text_dim=12,
        freq_dim=8,
        ffn_dim=32,
        num_layers=2,
        rope_dim=(4, 2, 2),
        is_amplify_history=True,
    )


def helios_inputs(side: int, batch: int) -> dict[str, Any]:
    """Three frames to make, and three that were made."""
    numbers = torch.arange(2 * FRAMES)[None]
    return {
        **wan_inputs(side, batch),
        "indices_hidden_states": numbers[:, FRAMES:],
        "indices_latents_history_short": numbers[:, 2:FRAMES],
        "latents_history_short": video(side, batch, 1),
        "indices_latents_history_mid": numbers[:, :2],
        "latents_history_mid": video(side, batch, 2),
    }


def any_flow(side: int, kind: Any = AnyFlowTransformer3DModel, **changed: Any) -> Any:
    settings = {
        **HEADS,
        **CHANNELS,
        "text_dim": 12,
        "freq_dim": 8,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return kind(**settings | changed)


def any_flow_inputs(side: int, batch: int) -> dict[str, Any]:
    times = torch.full((batch, FRAMES), 500.0)
    named = wan_inputs(side, batch)
    return {
        **named,
        "hidden_states": named["hidden_states"].transpose(1, 2),
        "timestep": times,
        "r_timestep": times - 100,
    }


def allegro(side: int, **changed: Any) -> Any:
    settings = {
        **CHANNELS,
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "num_layers": 2,
        "cross_attention_dim": 36,
        "sample_width": side,
        "sample_height": side,
        "sample_frames": FRAMES,
        "caption_channels": 12,
    }
    return AllegroTransformer3DModel(**settings | changed)


def allegro_inputs(side: int, batch: int) -> dict[str, Any]:
    half = side // 2
    grids = torch.cartesian_prod(torch.arange(FRAMES), torch.arange(half), torch.arange(half)).T[:, None]
    tables = tuple((torch.randn(size, 4).cos(), torch.randn(size, 4).sin()) for size in (FRAMES, half, half))
    return {
        **wan_inputs(side, batch),
        "encoder_attention_mask": kept(batch),
        "image_rotary_emb": (tables, tuple(grids)),
    }


def kandinsky5(layers: int = 2, *, visual_cond: bool = True) -> Any:
    return Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=12,
        in_text_dim2=10,
        time_dim=8,
        model_dim=24,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=layers,
        axes_dims=(4, 2, 2),
        visual_cond=visual_cond,
    )


def stable_audio(side: int, sample_size: int = 16) -> Any:
    return StableAudioDiTModel(
        sample_size=sample_size,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=12,
        time_proj_dim=8,
        global_states_input_dim=24,
        cross_attention_input_dim=12,
    )


def stable_audio_inputs(side: int, batch: int) -> dict[str, Any]:
    angles = torch.randn(2 * side + 1, 4)
    return {
        "hidden_states": torch.randn(batch, 4, 2 * side),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "global_hidden_states": torch.randn(batch, 1, 24),
        "rotary_embedding": (angles.cos(), angles.sin()),
    }


def stable_audio_3(side: int, **changed: Any) -> Any:
    settings = {
        "io_channels": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "cond_token_dim": 12,
        "global_cond_dim": 12,
        "local_add_cond_dim": 5,
        "timestep_features_dim": 8,
        "ff_mult": 2.0,
        "num_memory_tokens": 3,
    }
    return StableAudio3DiTModel(**settings | changed)


def stable_audio_3_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, 2 * side),
        "timestep": torch.full((batch,), 0.5),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "global_hidden_states": torch.randn(batch, 12),
        "encoder_attention_mask": kept(batch),
        "local_add_cond": torch.randn(batch, 5, 2 * side),
    }


def longcat_audio(side: int) -> Any:
    return LongCatAudioDiTTransformer(dit_dim=24, dit_depth=2, dit_heads=3, dit_text_dim=12, latent_dim=4, ff_mult=2.0)


def longcat_audio_inputs(side: int, batch: int) -> dict[str, Any]:
    present = torch.ones(batch, 2 * side + 1, dtype=torch.bool)
    present[-1, side:] = False
    return {
        "hidden_states": torch.randn(batch, 2 * side + 1, 4),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_attention_mask": kept(batch).bool(),
        "timestep": torch.full((batch,), 0.5),
        "attention_mask": present,
        "latent_cond": torch.randn(batch, 2 * side + 1, 4),
    }
