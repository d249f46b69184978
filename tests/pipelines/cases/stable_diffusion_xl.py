"""Stable Diffusion XL, which is also told the picture's sizes, and what is put on it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    DDIMScheduler,
    StableDiffusionXLAdapterPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetPAGImg2ImgPipeline,
    StableDiffusionXLControlNetPAGPipeline,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLControlNetUnionImg2ImgPipeline,
    StableDiffusionXLControlNetUnionInpaintPipeline,
    StableDiffusionXLControlNetUnionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
    StableDiffusionXLPAGImg2ImgPipeline,
    StableDiffusionXLPAGInpaintPipeline,
    StableDiffusionXLPAGPipeline,
    StableDiffusionXLPipeline,
    T2IAdapter,
    UNet2DConditionModel,
)

from tests.pipelines.case import Case
from tests.pipelines.cases import stable_diffusion
from tests.pipelines.cases.stable_diffusion import PAG, SIZE, controlled, picture, with_image_prompts
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

POOLED = 10
#: Numbers that a picture's sizes are given by: six where the model is not told how beautiful it shall be.
_NUMBERS, _FEATURES = 6, 4


def unet(numbers: int = _NUMBERS, **changed: Any) -> UNet2DConditionModel:
    settings: dict[str, Any] = {
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": _FEATURES,
        "projection_class_embeddings_input_dim": numbers * _FEATURES + POOLED,
    }
    return stable_diffusion.unet(**settings | changed)


def _union() -> ControlNetUnionModel:
    model = unet()
    copied = ("block_out_channels", "layers_per_block", "down_block_types", "cross_attention_dim", "norm_num_groups")
    told = ("addition_embed_type", "addition_time_embed_dim", "projection_class_embeddings_input_dim")
    settings: dict[str, Any] = {name: model.config[name] for name in (*copied, *told)}
    return randomized(
        ControlNetUnionModel(
            **settings,
            attention_head_dim=4,
            conditioning_embedding_out_channels=(4, 4, 4, 8),
            num_control_type=6,
            num_trans_channel=8,
            num_trans_head=2,
            num_trans_layer=1,
            num_proj_channel=8,
        )
    )


def plain(kind: Any, model: Any = None, **more: Any) -> Any:
    no_texts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return kind(
        vae=kl_autoencoder(),
        unet=unet() if model is None else model,
        scheduler=DDIMScheduler(clip_sample=False),
        **no_texts,
        **more,
    )


def silent(kind: Any, **more: Any) -> Any:
    """Leaves the visible watermark out, which needs a package of its own."""
    return plain(kind, add_watermarker=False, **more)


def _controlnet(kind: Any, **more: Any) -> Any:
    control = ControlNetModel.from_unet(unet(), conditioning_embedding_out_channels=(4, 4, 4, 8))
    return silent(kind, controlnet=randomized(control), **more)


def _adapted(kind: Any) -> Any:
    adapter = T2IAdapter(adapter_type="full_adapter", channels=[8, 16], num_res_blocks=1, downscale_factor=8)
    return plain(kind, adapter=randomized(adapter))


def pooled(call: Any) -> Any:
    """The same call with the pooled embeddings that this model reads besides."""
    return lambda samples: (
        call(samples)
        | {
            "pooled_prompt_embeds": noise(samples, POOLED, seed=3),
            "negative_pooled_prompt_embeds": noise(samples, POOLED, seed=4),
        }
    )


prompts = pooled(stable_diffusion.prompts)
from_picture = pooled(stable_diffusion.from_picture)
inpainted = pooled(stable_diffusion.inpainted)


def _edited(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"image": picture(samples), "image_guidance_scale": 1.5}


def _adapter_picture(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"image": picture(samples)}


def _united(call: Any) -> Any:
    """The same call with two pictures of different kinds for one ControlNet."""
    pictures = lambda samples: {"control_image": [picture(samples, 7), picture(samples, 8)]}  # noqa: E731
    return lambda samples: call(samples) | pictures(samples) | {"control_mode": [0, 3]}


def _image_prompt(samples: int) -> dict[str, Any]:
    embeds: list[torch.Tensor] = [noise(2, 1, POOLED, seed=8)]
    return prompts(1) | {"num_images_per_prompt": samples, "ip_adapter_image_embeds": embeds}


def _until_half(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"num_inference_steps": 4, "denoising_end": 0.5}


def _sized(samples: int) -> dict[str, Any]:
    """Wants another size in the unwanted branch, so that the two are told different numbers."""
    return prompts(samples) | {"negative_original_size": (32, 32), "negative_target_size": (SIZE["height"], 96)}


#: Pipelines of no further parts, with their calls.
_PLAIN: dict[Any, Any] = {
    StableDiffusionXLPipeline: prompts,
    StableDiffusionXLImg2ImgPipeline: from_picture,
    StableDiffusionXLInpaintPipeline: inpainted,
}
_PERTURBED: dict[Any, Any] = {
    StableDiffusionXLPAGPipeline: prompts,
    StableDiffusionXLPAGImg2ImgPipeline: from_picture,
    StableDiffusionXLPAGInpaintPipeline: inpainted,
}
_CONTROLLED: dict[Any, Any] = {
    StableDiffusionXLControlNetPipeline: prompts,
    StableDiffusionXLControlNetImg2ImgPipeline: from_picture,
    StableDiffusionXLControlNetInpaintPipeline: inpainted,
}
_UNITED: dict[Any, Any] = {
    StableDiffusionXLControlNetUnionPipeline: prompts,
    StableDiffusionXLControlNetUnionImg2ImgPipeline: from_picture,
    StableDiffusionXLControlNetUnionInpaintPipeline: inpainted,
}
_CONTROLLED_PERTURBED: dict[Any, Any] = {
    StableDiffusionXLControlNetPAGPipeline: prompts,
    StableDiffusionXLControlNetPAGImg2ImgPipeline: from_picture,
}


HERE = (
    *(Case(name=k.__name__, build=lambda k=k: silent(k), call=call) for k, call in _PLAIN.items()),
    *(Case(name=k.__name__, build=lambda k=k: silent(k, **PAG), call=call) for k, call in _PERTURBED.items()),
    *(
        Case(name=k.__name__, build=lambda k=k: _controlnet(k), call=controlled(call))
        for k, call in _CONTROLLED.items()
    ),
    *(
        Case(name=k.__name__, build=lambda k=k: silent(k, controlnet=_union()), call=_united(call))
        for k, call in _UNITED.items()
    ),
    *(
        Case(name=k.__name__, build=lambda k=k: _controlnet(k, **PAG), call=controlled(call))
        for k, call in _CONTROLLED_PERTURBED.items()
    ),
    Case(
        name="StableDiffusionXLPipeline + IP-Adapter",
        build=lambda: silent(StableDiffusionXLPipeline, model=with_image_prompts(unet(), 1), image_encoder=None),
        call=_image_prompt,
    ),
    Case(
        name="StableDiffusionXLPipeline + first half",
        build=lambda: silent(StableDiffusionXLPipeline),
        call=_until_half,
    ),
    Case(name="StableDiffusionXLPipeline + sizes", build=lambda: silent(StableDiffusionXLPipeline), call=_sized),
    Case(
        name="StableDiffusionXLInstructPix2PixPipeline",
        build=lambda: silent(StableDiffusionXLInstructPix2PixPipeline, model=unet(in_channels=8)),
        call=_edited,
    ),
    Case(
        name="StableDiffusionXLAdapterPipeline",
        build=lambda: _adapted(StableDiffusionXLAdapterPipeline),
        call=_adapter_picture,
    ),
)
