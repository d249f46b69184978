"""Tiny random models of every supported family, the inputs to call them with, and pipelines around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
)
from torch import nn

from partsong import ExpertMixture
from partsong.parallel.adapters import Adapter, adapter_for
from tests.newer_names import there
from tests.parallel import image_families as more
from tests.parallel import video_families as video
from tests.parallel import video_families_2026 as newer
from tests.parallel.image_families_pairs import PAIRS
from tests.parallel.image_families_sequences import SEQUENCES
from tests.parallel.newer_families import NEWER
from tests.tiny_models.weights import randomize


def dit(side: int, **changed: Any) -> Any:
    settings = {
        "num_attention_heads": 3,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "sample_size": side,
        "patch_size": 2,
        "num_embeds_ada_norm": 10,
        "norm_num_groups": 4,
    }
    return DiTTransformer2DModel(**settings | changed)


def _dit_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, side, side),
        "timestep": torch.full((batch,), 500),
        "class_labels": torch.arange(batch) % 10,
    }


def pixart(side: int) -> Any:
    return PixArtTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=side,
        patch_size=2,
        cross_attention_dim=24,
        caption_channels=12,
        use_additional_conditions=False,
    )


def _pixart_inputs(side: int, batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 7)
    keep[:, 5:] = 0
    return {
        "hidden_states": torch.randn(batch, 4, side, side + 2),
        "encoder_hidden_states": torch.randn(batch, 7, 12),
        "encoder_attention_mask": keep,
        "timestep": torch.full((batch,), 500),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def _masked_pixart_inputs(side: int, batch: int) -> dict[str, Any]:
    inputs = _pixart_inputs(side, batch)
    mask = torch.ones(batch, side * (side + 2) // 4)
    mask[:, 3:6] = 0
    mask[-1, -2:] = 0
    return {**inputs, "attention_mask": mask}


def sd3(side: int, kind: Any = SD3Transformer2DModel, **changed: Any) -> Any:
    settings = {
        "sample_size": side,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "joint_attention_dim": 12,
        "caption_projection_dim": 24,
        "pooled_projection_dim": 10,
        "pos_embed_max_size": 32,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    return kind(**settings | changed)


def _sd3_inputs(side: int, batch: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(batch, 4, side, side + 2),
        "encoder_hidden_states": torch.randn(batch, 5 + side % 4, 12),
        "pooled_projections": torch.randn(batch, 10),
        "timestep": torch.full((batch,), 500.0),
    }


class _Router(nn.Module):
    """Weighs four experts by the latents' mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 30 * hidden_states.mean(dim=(2, 3)) @ self.weight


def _experts(side: int) -> Any:
    return ExpertMixture([sd3(side) for _ in range(4)], _Router(), top_k=2)


def flux(side: int, kind: Any = FluxTransformer2DModel, **changed: Any) -> Any:
    settings = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 10,
        "guidance_embeds": False,
        "axes_dims_rope": (2, 2, 4),
    }
    return kind(**settings | changed)


def _flux_inputs(side: int, batch: int) -> dict[str, Any]:
    tokens = side * side // 4 + 1
    ids = torch.zeros(tokens, 3)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // side, torch.arange(tokens) % side
    text = 5 + side % 4
    return {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, text, 12),
        "pooled_projections": torch.randn(batch, 10),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(text, 3),
    }


@dataclass(frozen=True)
class Family:
    """How to make a tiny model and its inputs; `side` is the latent's side, odd multiples of 2 give odd tokens.

    `timestep` names the argument and `unit` is what a scheduler's timestep is divided by before it is passed on. In a
    `ragged` family the samples of a batch have texts of several lengths. Those of a `video` have several frames.
    """

    name: str
    build: Callable[[int], Any]
    inputs: Callable[[int, int], dict[str, Any]]
    timestep: str = "timestep"
    unit: int = 1
    ragged: bool = False
    video: bool = False

    def model(self, side: int, dtype: torch.dtype) -> Any:
        """The model with seeded random weights everywhere, also where the class starts with zeros."""
        torch.manual_seed(11)
        model = self.build(side).eval()
        randomize(model)
        return model.to(dtype)

    def call(self, side: int, batch: int, dtype: torch.dtype, seed: int = 5) -> dict[str, Any]:
        """Seeded inputs."""
        torch.manual_seed(seed)
        return {name: _cast(value, dtype) for name, value in self.inputs(side, batch).items()}

    def at(self, named: dict[str, Any], time: float) -> dict[str, Any]:
        """The inputs at another time; where frames or tokens have times of their own, all earlier or later."""
        times = named[self.timestep]
        if times.ndim > 1:
            return {**named, self.timestep: times * (time / self.unit / times.flatten()[0].item())}
        return {**named, self.timestep: torch.full_like(times, time / self.unit)}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


FAMILIES = there(
    {
        family.name: family
        for family in (
            Family("DiT", dit, _dit_inputs),
            Family("PixArt", pixart, _pixart_inputs),
            Family("PixArt masked", pixart, _masked_pixart_inputs),
            Family("SD3", sd3, _sd3_inputs),
            Family("Flux", flux, _flux_inputs, unit=1000),
            Family("Wan", video.wan, video.wan_inputs, video=True),
            Family("Flux2", more.flux2, more.flux2_inputs, unit=1000),
            Family("QwenImage", more.qwen_image, more.qwen_image_inputs, unit=1000),
            Family("Sana", more.sana, more.sana_inputs),
            Family("HunyuanDiT", more.hunyuan_dit, more.hunyuan_dit_inputs),
            Family("Lumina2", more.lumina2, more.lumina2_inputs, unit=1000, ragged=True),
            Family("AuraFlow", more.aura_flow, more.aura_flow_inputs, unit=1000),
            Family("Z-Image", more.z_image, more.z_image_inputs, timestep="t", unit=1000, ragged=True),
            Family("Wan, times per token", video.wan, video.wan_tokens_inputs, video=True),
            Family("SkyReels-V2", video.skyreels, video.wan_inputs, video=True),
            Family("SkyReels-V2 forcing", video.skyreels, video.skyreels_forcing_inputs, video=True),
            Family("LTX-Video", video.ltx, video.ltx_inputs, video=True),
            Family("LTX-Video, times per token", video.ltx, video.ltx_tokens_inputs, video=True),
            Family("CogVideoX", video.cogvideox, video.cogvideox_inputs, video=True),
            Family(
                "CogVideoX rotary",
                video.cogvideox_rotary,
                video.cogvideox_rotary_inputs,
                video=True,
            ),
            Family("HunyuanVideo", video.hunyuan_video, video.hunyuan_video_inputs, video=True),
            Family(
                "HunyuanVideo first frame",
                video.hunyuan_video_first_frame,
                video.hunyuan_video_inputs,
                video=True,
            ),
            Family("Mochi", video.mochi, video.mochi_inputs, ragged=True, video=True),
            Family("Latte", video.latte, video.wan_inputs, video=True),
            Family("Wan VACE", newer.wan_vace, newer.wan_vace_inputs, video=True),
            Family("ConsisID", newer.consis_id, newer.consis_id_inputs, video=True),
            Family("ChronoEdit", newer.chrono_edit, video.wan_inputs, video=True),
            Family("Cosmos", newer.cosmos, video.wan_inputs, video=True),
            Family("Cosmos, times per frame", newer.cosmos, newer.cosmos_frames_inputs, video=True),
            Family("HunyuanVideo 1.5", newer.hunyuan_video_15, newer.hunyuan_video_15_inputs, video=True),
            Family("EasyAnimate", newer.easy_animate, video.wan_inputs, video=True),
            Family("Helios", newer.helios, newer.helios_inputs, video=True),
            Family("AnyFlow", newer.any_flow, newer.any_flow_inputs, video=True),
            Family("Allegro", newer.allegro, newer.allegro_inputs, video=True),
            Family("Stable Audio", newer.stable_audio, newer.stable_audio_inputs, unit=1000),
            Family("Stable Audio 3", newer.stable_audio_3, newer.stable_audio_3_inputs, unit=1000),
            Family("LongCat-AudioDiT", newer.longcat_audio, newer.longcat_audio_inputs, unit=1000),
            Family("Experts", _experts, _sd3_inputs),
            *(
                Family(name, build, inputs, unit=unit)
                for name, (build, inputs, unit) in (PAIRS | SEQUENCES | NEWER).items()
            ),
        )
    },
    lambda family: family.build(8),
)


@functools.cache
def adapter_of(name: str) -> Adapter:
    """The row of a family's model."""
    return adapter_for(FAMILIES[name].build(8))
