"""Pipelines of further families, and those that start from an image or follow a ControlNet."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2Pipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    HunyuanDiTPipeline,
    Lumina2Pipeline,
    PixArtSigmaPipeline,
    QwenImagePipeline,
    SanaPipeline,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    ZImagePipeline,
)

from tests.parallel.families import FAMILIES, flux, sd3
from tests.parallel.image_families import flux2
from tests.parallel.pipelines import PIPES, Pipe, embeds, pooled_call, sized, vae
from tests.tiny_models.weights import randomize, randomized

Size = tuple[int, int]


def _flow() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler()


def _pixart_sigma(dtype: torch.dtype) -> Any:
    model = FAMILIES["PixArt"].model(6, dtype)
    return PixArtSigmaPipeline(None, None, vae(dtype), model, DPMSolverMultistepScheduler())


def _flux2(dtype: torch.dtype) -> Any:
    return Flux2Pipeline(_flow(), None, None, None, randomized(flux2(6, in_channels=16), dtype))


def _qwen_image(dtype: torch.dtype) -> Any:
    return QwenImagePipeline(_flow(), None, None, None, FAMILIES["QwenImage"].model(6, dtype))


def _sana(dtype: torch.dtype) -> Any:
    return SanaPipeline(None, None, None, FAMILIES["Sana"].model(6, dtype), DPMSolverMultistepScheduler())


def _hunyuan_dit(dtype: torch.dtype) -> Any:
    model = FAMILIES["HunyuanDiT"].model(6, dtype)
    scheduler = DPMSolverMultistepScheduler()
    return HunyuanDiTPipeline(vae(dtype), None, None, model, scheduler, None, None, requires_safety_checker=False)


def _lumina2(dtype: torch.dtype) -> Any:
    return Lumina2Pipeline(FAMILIES["Lumina2"].model(6, dtype), _flow(), vae(dtype), None, None)


def _aura_flow(dtype: torch.dtype) -> Any:
    return AuraFlowPipeline(None, None, None, FAMILIES["AuraFlow"].model(6, dtype), _flow())


def _z_image(dtype: torch.dtype) -> Any:
    return ZImagePipeline(_flow(), None, None, None, FAMILIES["Z-Image"].model(6, dtype))


def _two_prompts(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    return {
        "prompt_embeds": embeds(batch, dtype),
        "negative_prompt_embeds": embeds(batch, dtype, seed=2),
        "output_type": "latent",
        **sized(size),
    }


def _masked_prompts(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    keep = torch.ones(batch, 7, dtype=torch.int64)
    keep[:, 5:] = 0
    masks = {"prompt_attention_mask": keep, "negative_prompt_attention_mask": keep}
    return {**_two_prompts(batch, dtype, size), **masks, "negative_prompt": None}


def _unbinned(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    return {**_masked_prompts(batch, dtype, size), "use_resolution_binning": False}


def _one_prompt(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    return {"prompt_embeds": embeds(batch, dtype), "output_type": "latent", **sized(size)}


def _qwen_call(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    keep = torch.ones(batch, 7, dtype=torch.int64)
    keep[:, 5:] = 0
    masks = {"prompt_embeds_mask": keep, "negative_prompt_embeds_mask": keep}
    return {**_two_prompts(batch, dtype, size), **masks, "true_cfg_scale": 3.0}


def _hunyuan_call(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    named: dict[str, Any] = {"use_resolution_binning": False, "output_type": "latent", **sized(size)}
    for sign, seed in (("", 1), ("negative_", 2)):
        clip, t5 = embeds(batch, dtype, 5, seed), embeds(batch, dtype, 6, seed + 2)
        named |= {f"{sign}prompt_embeds": clip, f"{sign}prompt_embeds_2": torch.cat([t5, t5[..., :4]], -1)}
        named |= {f"{sign}prompt_attention_mask": torch.ones(batch, 5)}
        named |= {f"{sign}prompt_attention_mask_2": torch.ones(batch, 6)}
    return named


def _listed_prompts(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    named = _two_prompts(batch, dtype, size)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        named[name] = list(named[name].unbind(0))
    return named


def _picture(dtype: torch.dtype, size: Size) -> torch.Tensor:
    return torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def _from_picture(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    start = {"image": _picture(dtype, size), "strength": 0.7, "num_inference_steps": 4, "output_type": "latent"}
    return {**pooled_call(batch, dtype), **start, **sized(size)}


def _painted_in(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    mask = torch.zeros(1, 1, *size, dtype=dtype)
    mask[..., size[0] // 2 :, :] = 1
    return {**_from_picture(batch, dtype, size), "mask_image": mask}


def _controlled(batch: int, dtype: torch.dtype, size: Size) -> dict[str, Any]:
    control = {"control_image": _picture(dtype, size), "output_type": "latent"}
    return {**pooled_call(batch, dtype), **control, "controlnet_conditioning_scale": 0.8, **sized(size)}


def _again(kind: Any, name: str, **more: Any) -> Any:
    """A pipeline of another class around the parts of a known one."""

    def build(dtype: torch.dtype) -> Any:
        parts = dict(PIPES[name].build(dtype).components)
        return kind(**parts, **{key: make(dtype) for key, make in more.items()})

    return build


def _sd3_control(dtype: torch.dtype) -> Any:
    model = sd3(6, SD3ControlNetModel, num_layers=2, dual_attention_layers=())
    torch.manual_seed(12)
    randomize(model)
    return model.to(dtype).eval()


def _flux_control(dtype: torch.dtype) -> Any:
    model = flux(6, FluxControlNetModel, in_channels=16, num_single_layers=1)
    torch.manual_seed(12)
    randomize(model)
    return model.to(dtype).eval()


IMAGE_PIPES = {
    "PixArt-Sigma": Pipe(_pixart_sigma, _unbinned),
    "Flux2": Pipe(_flux2, _one_prompt),
    "QwenImage": Pipe(_qwen_image, _qwen_call, calls=2),
    "Sana": Pipe(_sana, _unbinned),
    "HunyuanDiT": Pipe(_hunyuan_dit, _hunyuan_call),
    "Lumina2": Pipe(_lumina2, _masked_prompts, calls=2),
    "AuraFlow": Pipe(_aura_flow, _masked_prompts),
    "Z-Image": Pipe(_z_image, _listed_prompts),
    "SD3 image-to-image": Pipe(_again(StableDiffusion3Img2ImgPipeline, "SD3"), _from_picture),
    "Flux image-to-image": Pipe(_again(FluxImg2ImgPipeline, "Flux"), _from_picture),
    "Flux inpainting": Pipe(_again(FluxInpaintPipeline, "Flux"), _painted_in),
    "SD3 ControlNet": Pipe(_again(StableDiffusion3ControlNetPipeline, "SD3", controlnet=_sd3_control), _controlled),
    "Flux ControlNet": Pipe(_again(FluxControlNetPipeline, "Flux", controlnet=_flux_control), _controlled),
}
