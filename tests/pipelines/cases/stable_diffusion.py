"""Stable Diffusion and what is put on it: images, masks, ControlNets, perturbed attention, IP-Adapters."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    DDIMScheduler,
    LatentConsistencyModelImg2ImgPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPAGInpaintPipeline,
    StableDiffusionControlNetPAGPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPAGImg2ImgPipeline,
    StableDiffusionPAGInpaintPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

from tests.parallel.unets import plain_unet
from tests.pipelines.case import Case
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

WIDTH = 12
SIZE = {"height": 64, "width": 80}


def unet(**changed: Any) -> UNet2DConditionModel:
    sizes = {
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return randomized(plain_unet(**sizes | changed))


def with_image_prompts(model: Any, adapters: int) -> Any:
    """Puts IP-Adapters on a UNet: its cross-attention reads two more tokens for each, made of an image's embedding."""
    projections = [randomized(ImageProjection(10, WIDTH, 2)) for _ in range(adapters)]
    model.encoder_hid_proj = MultiIPAdapterImageProjection(projections)
    model.config["encoder_hid_dim_type"] = "ip_image_proj"
    processors: dict[str, Any] = dict(model.attn_processors)
    for name in processors:
        if name.endswith("attn2.processor"):
            size = model.get_submodule(name.removesuffix(".processor")).inner_dim
            processors[name] = randomized(IPAdapterAttnProcessor2_0(size, WIDTH, (2,) * adapters, [0.6] * adapters))
    model.set_attn_processor(processors)
    return model


def control() -> ControlNetModel:
    return randomized(ControlNetModel.from_unet(unet(), conditioning_embedding_out_channels=(4, 4, 4, 8)))


def plain(kind: Any, model: Any = None, scheduler: Any = None, **more: Any) -> Any:
    parts = {"text_encoder": None, "tokenizer": None, "safety_checker": None, "feature_extractor": None}
    return kind(
        vae=kl_autoencoder(),
        unet=unet() if model is None else model,
        scheduler=DDIMScheduler(clip_sample=False) if scheduler is None else scheduler,
        requires_safety_checker=False,
        **parts,
        **more,
    )


def prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 5, WIDTH, seed=1),
        "negative_prompt_embeds": noise(samples, 5, WIDTH, seed=2),
        "guidance_scale": 3.0,
        "num_inference_steps": 3,
        "output_type": "latent",
        **SIZE,
    }


def picture(samples: int, seed: int = 5) -> torch.Tensor:
    return noise(samples, 3, SIZE["height"], SIZE["width"], seed=seed).sigmoid()


def from_picture(samples: int) -> dict[str, Any]:
    named = prompts(samples) | {"image": picture(samples), "strength": 0.7}
    return {name: value for name, value in named.items() if name not in SIZE}


def inpainted(samples: int) -> dict[str, Any]:
    mask = (noise(samples, 1, SIZE["height"], SIZE["width"], seed=6) > 0).double()
    return prompts(samples) | {"image": picture(samples), "mask_image": mask, "strength": 0.7}


def controlled(call: Any) -> Any:
    """The same call with a picture for the ControlNet."""
    name = "control_image" if "image" in call(1) else "image"
    return lambda samples: call(samples) | {name: picture(samples, seed=7)}


def _image_prompts(adapters: int) -> Any:
    return lambda samples: (
        prompts(1)
        | {
            "num_images_per_prompt": samples,
            "ip_adapter_image_embeds": [noise(2, 1, 10, seed=8 + number) for number in range(adapters)],
        }
    )


def _without_guidance(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"guidance_scale": 0.0}


def _guided_at_first(samples: int) -> dict[str, Any]:
    """Drops guidance after the first step, as diffusers' own documentation does it."""

    def drop(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe._guidance_scale = 0.0
            kept["prompt_embeds"] = kept["prompt_embeds"].chunk(2)[-1]
        return kept

    return prompts(samples) | {
        "callback_on_step_end": drop,
        "callback_on_step_end_tensor_inputs": ["prompt_embeds"],
    }


def _unguided(call: Any) -> Any:
    """The same call for a distilled model, which is given the scale itself."""
    return lambda samples: {name: value for name, value in call(samples).items() if not name.startswith("negative")}


def _distilled(kind: Any) -> Any:
    return plain(kind, unet(time_cond_proj_dim=8), LCMScheduler())


PAG = {"pag_applied_layers": "mid"}

HERE = (
    Case(name="StableDiffusionPipeline", build=lambda: plain(StableDiffusionPipeline), call=prompts),
    Case(
        name="StableDiffusionPipeline + one sample",
        build=lambda: plain(StableDiffusionPipeline),
        call=prompts,
        samples=1,
    ),
    Case(
        name="StableDiffusionPipeline + guidance dropped",
        build=lambda: plain(StableDiffusionPipeline),
        call=_guided_at_first,
    ),
    *(
        Case(
            name=f"StableDiffusionPipeline + IP-Adapter x {adapters}",
            build=lambda n=adapters: plain(StableDiffusionPipeline, with_image_prompts(unet(), n), image_encoder=None),
            call=_image_prompts(adapters),
        )
        for adapters in (1, 2)
    ),
    Case(name="StableDiffusionImg2ImgPipeline", build=lambda: plain(StableDiffusionImg2ImgPipeline), call=from_picture),
    Case(name="StableDiffusionInpaintPipeline", build=lambda: plain(StableDiffusionInpaintPipeline), call=inpainted),
    Case(
        name="StableDiffusionControlNetPipeline",
        build=lambda: plain(StableDiffusionControlNetPipeline, controlnet=control()),
        call=controlled(prompts),
    ),
    Case(
        name="StableDiffusionControlNetImg2ImgPipeline",
        build=lambda: plain(StableDiffusionControlNetImg2ImgPipeline, controlnet=control()),
        call=controlled(from_picture),
    ),
    Case(
        name="StableDiffusionControlNetInpaintPipeline",
        build=lambda: plain(StableDiffusionControlNetInpaintPipeline, controlnet=control()),
        call=controlled(inpainted),
    ),
    Case(name="StableDiffusionPAGPipeline", build=lambda: plain(StableDiffusionPAGPipeline, **PAG), call=prompts),
    Case(
        name="StableDiffusionPAGPipeline + no other guidance",
        build=lambda: plain(StableDiffusionPAGPipeline, **PAG),
        call=_without_guidance,
    ),
    Case(
        name="StableDiffusionPAGImg2ImgPipeline",
        build=lambda: plain(StableDiffusionPAGImg2ImgPipeline, **PAG),
        call=from_picture,
    ),
    Case(
        name="StableDiffusionPAGInpaintPipeline",
        build=lambda: plain(StableDiffusionPAGInpaintPipeline, **PAG),
        call=inpainted,
    ),
    Case(
        name="StableDiffusionControlNetPAGPipeline",
        build=lambda: plain(StableDiffusionControlNetPAGPipeline, controlnet=control(), **PAG),
        call=controlled(prompts),
    ),
    Case(
        name="StableDiffusionControlNetPAGInpaintPipeline",
        build=lambda: plain(StableDiffusionControlNetPAGInpaintPipeline, controlnet=control(), **PAG),
        call=controlled(inpainted),
    ),
    Case(
        name="LatentConsistencyModelPipeline",
        build=lambda: _distilled(LatentConsistencyModelPipeline),
        call=_unguided(prompts),
    ),
    Case(
        name="LatentConsistencyModelImg2ImgPipeline",
        build=lambda: _distilled(LatentConsistencyModelImg2ImgPipeline),
        call=_unguided(from_picture),
    ),
)
