"""DeepFloyd IF, which samples pixels, and makes them more."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDPMScheduler,
    IFImg2ImgPipeline,
    IFImg2ImgSuperResolutionPipeline,
    IFInpaintingPipeline,
    IFInpaintingSuperResolutionPipeline,
    IFPipeline,
    IFSuperResolutionPipeline,
)

from tests.pipelines.case import NO_COLUMNS, Case
from tests.pipelines.cases.stable_diffusion import WIDTH, unet
from tests.tiny_models.weights import noise

_SIZE = {"height": 16, "width": 20}
#: Its attention reads the text beside the picture, and its blocks change the resolution inside a residual block.
_BLOCKS: dict[str, Any] = {
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "encoder_hid_dim": WIDTH,
    "addition_embed_type": "text",
    "addition_embed_type_num_heads": 2,
    "resnet_time_scale_shift": "scale_shift",
    "act_fn": "gelu",
    "out_channels": 6,
}


def _pipe(kind: Any, **more: Any) -> Any:
    nothing = dict.fromkeys(("tokenizer", "text_encoder", "safety_checker", "feature_extractor", "watermarker"))
    inputs = {"in_channels": 6, "class_embed_type": "timestep"} if more else {"in_channels": 3}
    return kind(
        unet=unet(**_BLOCKS | inputs),
        scheduler=DDPMScheduler(variance_type="learned_range"),
        requires_safety_checker=False,
        **nothing,
        **more,
    )


def _larger(kind: Any) -> Any:
    return _pipe(kind, image_noising_scheduler=DDPMScheduler())


def _prompts(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 5, WIDTH, seed=1),
        "negative_prompt_embeds": noise(samples, 5, WIDTH, seed=2),
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "pt",
    }


def _picture(samples: int, shrunk: int = 1) -> Any:
    return noise(samples, 3, _SIZE["height"] // shrunk, _SIZE["width"] // shrunk, seed=5).clamp(-1, 1)


def _from_text(samples: int) -> dict[str, Any]:
    return _prompts(samples) | _SIZE


def _from_picture(samples: int) -> dict[str, Any]:
    return _prompts(samples) | {"image": _picture(samples), "strength": 0.7, "num_inference_steps": 3}


def _inpainted(samples: int) -> dict[str, Any]:
    mask = (noise(samples, 1, _SIZE["height"], _SIZE["width"], seed=6) > 0).double()
    return _from_picture(samples) | {"mask_image": mask}


def _enlarged(samples: int) -> dict[str, Any]:
    return _from_text(samples) | {"image": _picture(samples, 2), "noise_level": 20}


def _small_and_large(call: Any) -> Any:
    return lambda samples: (
        call(samples) | {"image": _picture(samples, 2), "original_image": _picture(samples), "noise_level": 20}
    )


#: Pipelines with their calls: those that make pictures, and those that make them larger.
_FIRST: dict[Any, Any] = {
    IFPipeline: _from_text,
    IFImg2ImgPipeline: _from_picture,
    IFInpaintingPipeline: _inpainted,
}
_SECOND: dict[Any, Any] = {
    IFSuperResolutionPipeline: _enlarged,
    IFImg2ImgSuperResolutionPipeline: _small_and_large(_from_picture),
    IFInpaintingSuperResolutionPipeline: _small_and_large(_inpainted),
}

HERE = (
    *(Case(name=k.__name__, build=lambda k=k: _pipe(k), call=call, refused=NO_COLUMNS) for k, call in _FIRST.items()),
    *(
        Case(name=k.__name__, build=lambda k=k: _larger(k), call=call, refused=NO_COLUMNS)
        for k, call in _SECOND.items()
    ),
)
