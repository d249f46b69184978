"""Pipelines around the tiny video models; prompts come as embeddings."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    LattePipeline,
    LTXPipeline,
    MochiPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Pipeline,
    UniPCMultistepScheduler,
)

from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import Pipe, embeds, sized
from tests.parallel.video_families import FRAMES, kept
from tests.tiny_models.weights import randomized

Size = tuple[int, int]


def _flow() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler()


def _unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def _ltx(dtype: torch.dtype) -> Any:
    return LTXPipeline(_flow(), None, None, None, FAMILIES["LTX-Video"].model(6, dtype))


def _cogvideox(dtype: torch.dtype) -> Any:
    return CogVideoXPipeline(None, None, None, FAMILIES["CogVideoX"].model(6, dtype), CogVideoXDDIMScheduler())


def _cogvideox_rotary(dtype: torch.dtype) -> Any:
    model = FAMILIES["CogVideoX rotary"].build(6)
    model = type(model)(**{**model.config, "ofs_embed_dim": None})
    return CogVideoXPipeline(None, None, None, randomized(model, dtype), CogVideoXDPMScheduler())


def _hunyuan_video(dtype: torch.dtype) -> Any:
    model = FAMILIES["HunyuanVideo"].model(6, dtype)
    return HunyuanVideoPipeline(None, None, model, None, _flow(), None, None)


def _mochi(dtype: torch.dtype) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return MochiPipeline(scheduler, None, None, None, FAMILIES["Mochi"].model(6, dtype))


def _latte(dtype: torch.dtype) -> Any:
    return LattePipeline(None, None, None, FAMILIES["Latte"].model(6, dtype), DDIMScheduler())


def _skyreels(dtype: torch.dtype) -> Any:
    return SkyReelsV2Pipeline(None, None, FAMILIES["SkyReels-V2"].model(6, dtype), None, _unipc())


def _skyreels_forcing(dtype: torch.dtype) -> Any:
    model = FAMILIES["SkyReels-V2"].build(6)
    model = type(model)(**{**model.config, "inject_sample_info": True})
    return SkyReelsV2DiffusionForcingPipeline(None, None, randomized(model, dtype), None, _unipc())


def _prompts(batch: int, dtype: torch.dtype, size: Size, frames: int) -> dict[str, Any]:
    return {
        "prompt_embeds": embeds(batch, dtype),
        "negative_prompt_embeds": embeds(batch, dtype, seed=2),
        "num_frames": frames,
        "output_type": "latent",
        **sized(size),
    }


def _causal(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    """An autoencoder that makes four frames of each but the first."""
    return _prompts(batch, dtype, size, 4 * (FRAMES - 1) + 1)


def _forcing(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    return {**_causal(batch, dtype, size), "prompt": None, "fps": 24}


def _forcing_apart(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    """Later frames begin later, so that each has a noise level of its own."""
    return {**_forcing(batch, dtype, size), "ar_step": 1}


def _masked(batch: int, dtype: torch.dtype, size: Size, frames: int) -> dict[str, Any]:
    masks = {"prompt_attention_mask": kept(batch), "negative_prompt_attention_mask": torch.ones(batch, 7)}
    return {**_prompts(batch, dtype, size, frames), **masks}


def _ltx_call(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    return _masked(batch, dtype, (4 * size[0], 4 * size[1]), 8 * (FRAMES - 1) + 1)


def _hunyuan_call(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    named = {**_causal(batch, dtype, size), "true_cfg_scale": 3.0}
    for sign in ("", "negative_"):
        named[f"{sign}pooled_prompt_embeds"] = torch.ones(batch, 10, dtype=dtype)
        named[f"{sign}prompt_attention_mask"] = kept(batch).to(dtype)
    return named


def _mochi_call(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    named = _masked(batch, dtype, size, 6 * (FRAMES - 1) + 1)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        named[name] = torch.cat([named[name], named[name][..., :4]], dim=-1)
        mask = name.replace("embeds", "attention_mask")
        named[mask] = named[mask].bool()
    return named


def _latte_call(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    named = _prompts(batch, dtype, (48, 48), 0)
    del named["num_frames"]
    return {**named, "video_length": FRAMES, "negative_prompt": None}


#: Wan's is in `pipelines`, with the picture pipelines of each kind.
VIDEO_PIPES = {
    "LTX-Video": Pipe(_ltx, _ltx_call),
    "CogVideoX": Pipe(_cogvideox, _causal),
    "CogVideoX rotary, DPM": Pipe(_cogvideox_rotary, _causal),
    "HunyuanVideo": Pipe(_hunyuan_video, _hunyuan_call, calls=2),
    "Mochi": Pipe(_mochi, _mochi_call),
    "Latte": Pipe(_latte, _latte_call),
    "SkyReels-V2": Pipe(_skyreels, _causal, calls=2),
    "SkyReels-V2 forcing": Pipe(_skyreels_forcing, _forcing, calls=2),
    "SkyReels-V2 forcing, frames apart": Pipe(_skyreels_forcing, _forcing_apart, calls=2),
}
