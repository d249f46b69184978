"""Qwen-Image: from text, from images, edited, in layers, and with ControlNets."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImageControlNetInpaintPipeline,
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    QwenImageEditInpaintPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageImg2ImgPipeline,
    QwenImageInpaintPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
)

from tests.parallel.image_families import qwen_image
from tests.pipelines.case import Case
from tests.pipelines.parts import Absent, coarse, half_mask, picture, pil_picture, prompts
from tests.tiny_models.autoencoders import qwen_autoencoder
from tests.tiny_models.weights import noise, randomized


def _pipe(kind: Any, *, vae: Any = None, control: Any = None, **changed: Any) -> Any:
    parts = {} if control is None else {"controlnet": randomized(qwen_image(6, QwenImageControlNetModel, **control))}
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae or qwen_autoencoder(),
        text_encoder=Absent(),
        tokenizer=None,
        transformer=randomized(qwen_image(6, **changed)),
        **parts,
    )


def _editor(kind: Any, channels: int = 3, **changed: Any) -> Any:
    # A picture with as many channels as latents have would be taken for latents.
    vae = qwen_autoencoder(input_channels=channels, z_dim=6, latents_mean=[0.0] * 6, latents_std=[1.0] * 6)
    transformer = randomized(qwen_image(6, in_channels=24, out_channels=6, **changed))
    pipe = kind(FlowMatchEulerDiscreteScheduler(), coarse(vae), Absent(), None, None, transformer)
    pipe.vae_scale_factor *= 8
    return pipe


def _prompts(samples: int) -> dict[str, Any]:
    keep = noise(samples, 7, seed=8).abs() >= 0
    keep[-1, 5:] = False
    return prompts(samples, prompt_embeds_mask=keep.long(), negative_prompt_embeds_mask=keep.long(), true_cfg_scale=3.0)


def _from_image(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": picture(samples), "strength": 0.7, "num_inference_steps": 3}


def _painted(samples: int) -> dict[str, Any]:
    return _from_image(samples) | {"mask_image": half_mask(samples)}


def _controlled(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"control_image": picture(samples, seed=6), "controlnet_conditioning_scale": 0.8}


def _edited(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": pil_picture(), "height": 384, "width": 640}


def _edited_in_part(samples: int) -> dict[str, Any]:
    # As large as the pipeline makes a picture of this shape: 9 x 7 tokens.
    size = {"image": pil_picture(72, 56), "mask_image": pil_picture(72, 56, mode="L"), "height": 896, "width": 1152}
    return _prompts(samples) | size | {"strength": 0.7, "num_inference_steps": 3}


def _layered(samples: int) -> dict[str, Any]:
    named = _prompts(samples) | {
        "image": pil_picture(64, 64, mode="RGBA"),
        "layers": 2,
        "resolution": 640,
        "prompt": "x",
        "output_type": "pt",
    }
    return {name: value for name, value in named.items() if name not in ("height", "width")}


HERE = (
    Case(name="QwenImagePipeline", build=lambda: _pipe(QwenImagePipeline), call=_prompts),
    Case(name="QwenImageImg2ImgPipeline", build=lambda: _pipe(QwenImageImg2ImgPipeline), call=_from_image),
    Case(name="QwenImageInpaintPipeline", build=lambda: _pipe(QwenImageInpaintPipeline), call=_painted),
    Case(
        name="QwenImageControlNetPipeline",
        build=lambda: _pipe(QwenImageControlNetPipeline, control={}),
        call=_controlled,
    ),
    Case(
        name="QwenImageControlNetInpaintPipeline",
        build=lambda: _pipe(QwenImageControlNetInpaintPipeline, control={"extra_condition_channels": 4}),
        call=lambda samples: _controlled(samples) | {"control_mask": half_mask(samples)},
    ),
    Case(name="QwenImageEditPipeline", build=lambda: _editor(QwenImageEditPipeline), call=_edited, samples=1),
    Case(
        name="QwenImageEditPlusPipeline",
        build=lambda: _editor(QwenImageEditPlusPipeline, zero_cond_t=True),
        call=_edited,
        samples=1,
    ),
    Case(
        name="QwenImageEditInpaintPipeline",
        build=lambda: _editor(QwenImageEditInpaintPipeline),
        call=_edited_in_part,
        samples=1,
    ),
    Case(
        name="QwenImageLayeredPipeline",
        build=lambda: _editor(QwenImageLayeredPipeline, channels=4, use_layer3d_rope=True, use_additional_t_cond=True),
        call=_layered,
        samples=1,
    ),
)
