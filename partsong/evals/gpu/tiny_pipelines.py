"""Builds pipelines with tiny random models, and their calls; prompts come as embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TINY", "TinyPipeline"]

#: Text tokens and their numbers.
TEXT, TEXT_WIDTH = 7, 16


@dataclass(frozen=True, slots=True)
class TinyPipeline:
    """Describes one pipeline.

    Attributes:
        build: makes it, for a GPU or not; the caller sets the seed.
        call: makes the arguments of a call for samples, steps, a device and a type; `prompt` chooses the text.
        denoiser: which part denoises.
    """

    build: Callable[[bool], Any]
    call: Callable[..., dict[str, Any]]
    denoiser: str = "transformer"

    def make(self, device: torch.device | str, dtype: torch.dtype) -> Any:
        """Builds it on a device, with the same random weights in every process."""
        torch.manual_seed(11)
        pipe = self.build(torch.device(device).type == "cuda")
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                _draw(part.eval())
        pipe.to(device, dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe


@torch.no_grad()
def _draw(module: nn.Module) -> None:
    """Draws all weights, also those that the class starts with zeros, so small that a few steps stay comparable."""
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1)


def _noise(device: Any, dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _autoencoder(**changed: Any) -> Any:
    from diffusers import AutoencoderKL

    settings: dict[str, Any] = {
        "block_out_channels": (4, 4, 4, 4),
        "latent_channels": 4,
        "norm_num_groups": 2,
        "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    return AutoencoderKL(**settings | changed)


def _flux(on_gpu: bool) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    )
    texts: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = FlowMatchEulerDiscreteScheduler()
    return FluxPipeline(scheduler=scheduler, vae=_autoencoder(shift_factor=0.1), transformer=transformer, **texts)


def _call(device: Any, dtype: torch.dtype, samples: int, steps: int, prompt: int, size: tuple[int, int]) -> dict:
    return {
        "prompt_embeds": _noise(device, dtype, 10 * prompt + 1, samples, TEXT, TEXT_WIDTH),
        "negative_prompt_embeds": _noise(device, dtype, 2, samples, TEXT, TEXT_WIDTH),
        "guidance_scale": 3.0,
        "num_inference_steps": steps,
        "output_type": "latent",
        "height": size[0],
        "width": size[1],
        "generator": torch.Generator().manual_seed(9),
    }


def _flux_call(device: Any, dtype: torch.dtype, *, samples: int = 1, steps: int = 2, prompt: int = 0) -> dict[str, Any]:
    pooled = (_noise(device, dtype, seed, samples, 8) for seed in (3, 4))
    names = ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    whole = _call(device, dtype, samples, steps, prompt, (80, 112))
    return whole | dict(zip(names, pooled, strict=True)) | {"true_cfg_scale": 3.0}


def _wan(on_gpu: bool) -> Any:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_WIDTH,
        freq_dim=16,
        ffn_dim=64,
        num_layers=4,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    parts: dict[str, Any] = {"scheduler": scheduler, "tokenizer": None, "text_encoder": None}
    return WanPipeline(transformer=transformer, vae=vae, **parts)


def _wan_call(device: Any, dtype: torch.dtype, *, samples: int = 1, steps: int = 2, prompt: int = 0) -> dict[str, Any]:
    return _call(device, dtype, samples, steps, prompt, (80, 112)) | {"num_frames": 9}


def _stable_diffusion(on_gpu: bool) -> Any:
    """Makes heads of 160 numbers on a GPU, as the lowest level of Stable Diffusion 1.5 has: kernels take them apart."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    kind: Any = UNet2DConditionModel  # its annotations name only one of the forms it takes
    unet = kind(
        sample_size=16,
        block_out_channels=(32, 640 if on_gpu else 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    parts: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    scheduler = DDIMScheduler(clip_sample=False, steps_offset=1)
    known = {"vae": _autoencoder(), "unet": unet, "scheduler": scheduler, "requires_safety_checker": False}
    return StableDiffusionPipeline(**known, **parts)


def _stable_call(device: Any, dtype: torch.dtype, *, samples: int = 1, steps: int = 2, prompt: int = 0) -> dict:
    return _call(device, dtype, samples, steps, prompt, (64, 96))


#: By the name of the model that they are like.
TINY = {
    "Flux": TinyPipeline(_flux, _flux_call),
    "Wan": TinyPipeline(_wan, _wan_call),
    "SD 1.5": TinyPipeline(_stable_diffusion, _stable_call, "unet"),
}
