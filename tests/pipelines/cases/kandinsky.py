"""Kandinsky 2.1 and 2.2: a prior makes an image's embedding of a text, a decoder makes a picture of the embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    KandinskyCombinedPipeline,
    KandinskyImg2ImgCombinedPipeline,
    KandinskyImg2ImgPipeline,
    KandinskyInpaintCombinedPipeline,
    KandinskyInpaintPipeline,
    KandinskyPipeline,
    KandinskyPriorPipeline,
    KandinskyV22CombinedPipeline,
    KandinskyV22ControlnetImg2ImgPipeline,
    KandinskyV22ControlnetPipeline,
    KandinskyV22Img2ImgCombinedPipeline,
    KandinskyV22Img2ImgPipeline,
    KandinskyV22InpaintCombinedPipeline,
    KandinskyV22InpaintPipeline,
    KandinskyV22Pipeline,
    KandinskyV22PriorEmb2EmbPipeline,
    KandinskyV22PriorPipeline,
    UnCLIPScheduler,
    VQModel,
)
from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from transformers import CLIPTextModelWithProjection

from tests.pipelines.case import NO_COLUMNS, Case
from tests.pipelines.cases.stable_diffusion import unet
from tests.pipelines.unet_parts import clip_pictures, clip_text, clip_tokenizer, clip_vision, photo, prior
from tests.tiny_models.weights import noise, randomized

SIDE = 32
#: Width of an image's embedding, and of the hidden states of the decoder's own text encoder.
_EMBEDDING, _TEXT = 12, 8
#: Its attention reads the text beside the picture, and its blocks change the resolution inside a residual block.
BLOCKS: dict[str, Any] = {
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "resnet_time_scale_shift": "scale_shift",
    "out_channels": 8,
}


def movq() -> VQModel:
    """Twice smaller latents."""
    model = VQModel(
        block_out_channels=(32, 32),  # its norms have 32 groups
        down_block_types=("DownEncoderBlock2D", "AttnDownEncoderBlock2D"),
        up_block_types=("AttnUpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )
    return randomized(model)


def _multilingual() -> MultilingualCLIP:
    config = MCLIPConfig(
        transformerDimSize=_TEXT,
        imageDimSize=_EMBEDDING,
        hidden_size=_TEXT,
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=100,
        max_position_embeddings=90,
    )
    return randomized(MultilingualCLIP(config))


def _first(kind: Any, channels: int = 4, scheduler: Any = None, **more: Any) -> Any:
    """Kandinsky 2.1: its decoder reads text and embedding."""
    read = {"encoder_hid_dim_type": "text_image_proj", "addition_embed_type": "text_image", "encoder_hid_dim": _TEXT}
    return kind(
        text_encoder=_multilingual(),
        tokenizer=clip_tokenizer(77),
        unet=unet(**BLOCKS | read, in_channels=channels),
        scheduler=DDIMScheduler(clip_sample=False) if scheduler is None else scheduler,
        movq=movq(),
        **more,
    )


def _second(kind: Any, channels: int = 4, hinted: bool = False, **more: Any) -> Any:
    """Kandinsky 2.2: its decoder reads the embedding alone."""
    read = {"encoder_hid_dim_type": "image_proj", "encoder_hid_dim": _EMBEDDING, "addition_embed_type": "image"}
    read |= {"addition_embed_type": "image_hint"} if hinted else {}
    return kind(unet=unet(**BLOCKS | read, in_channels=channels), scheduler=DDPMScheduler(), movq=movq(), **more)


def _prior_parts(begin: str = "") -> dict[str, Any]:
    parts = {
        "prior": prior(_EMBEDDING),
        "image_encoder": clip_vision(_EMBEDDING),
        "text_encoder": clip_text(_EMBEDDING, CLIPTextModelWithProjection),
        "tokenizer": clip_tokenizer(),
        "scheduler": UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample", clip_sample=False),
        "image_processor": clip_pictures(),
    }
    return {begin + name: part for name, part in parts.items()}


def _call(samples: int) -> dict[str, Any]:
    return {
        "num_images_per_prompt": samples,
        "height": SIDE,
        "width": SIDE,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "output_type": "pt",
    }


def _embedded(samples: int) -> dict[str, Any]:
    embeds = {"image_embeds": noise(1, _EMBEDDING, seed=1), "negative_image_embeds": noise(1, _EMBEDDING, seed=2)}
    return _call(samples) | embeds


def _told(samples: int) -> dict[str, Any]:
    return _embedded(samples) | {"prompt": "a fox"}


def _said(samples: int) -> dict[str, Any]:
    """Several prompts rather than several pictures of one: of those these pipelines make too few masks."""
    return _call(1) | {"prompt": ["a fox"] * samples, "prior_num_inference_steps": 2}


def _from_picture(call: Any) -> Any:
    return lambda samples: call(samples) | {"image": photo(SIDE), "strength": 0.7, "num_inference_steps": 3}


def _from_pictures(samples: int) -> dict[str, Any]:
    return _from_picture(_said)(samples) | {"image": [photo(SIDE)] * samples}


def _inpainted(call: Any) -> Any:
    mask = np.zeros((SIDE, SIDE), dtype=np.float32)
    mask[: SIDE // 2] = 1
    return lambda samples: call(samples) | {"image": photo(SIDE), "mask_image": mask}


def _hinted(call: Any) -> Any:
    return lambda samples: call(samples) | {"hint": noise(1, 3, SIDE * 4, SIDE * 4, seed=7)}


def _of_text(samples: int) -> dict[str, Any]:
    return {"prompt": "a fox", "num_images_per_prompt": samples, "num_inference_steps": 2, "output_type": "pt"}


def _of_embedding(samples: int) -> dict[str, Any]:
    return _of_text(samples) | {"image": photo(SIDE), "strength": 0.7, "num_inference_steps": 3}


#: Decoders with the channels they read and their calls; then pipelines that hold a prior besides.
_FIRSTS: dict[Any, Any] = {
    KandinskyPipeline: (4, _told),
    KandinskyImg2ImgPipeline: (4, _from_picture(_told)),
    KandinskyInpaintPipeline: (9, _inpainted(_told)),
}
_FIRSTS_COMBINED: dict[Any, Any] = {
    KandinskyCombinedPipeline: (4, _said),
    KandinskyImg2ImgCombinedPipeline: (4, _from_pictures),
    KandinskyInpaintCombinedPipeline: (9, _inpainted(_said)),
}
_SECONDS: dict[Any, Any] = {
    KandinskyV22Pipeline: (4, _embedded),
    KandinskyV22Img2ImgPipeline: (4, _from_picture(_embedded)),
    KandinskyV22InpaintPipeline: (9, _inpainted(_embedded)),
}
_SECONDS_HINTED: dict[Any, Any] = {
    KandinskyV22ControlnetPipeline: (8, _hinted(_embedded)),
    KandinskyV22ControlnetImg2ImgPipeline: (8, _hinted(_from_picture(_embedded))),
}
_SECONDS_COMBINED: dict[Any, Any] = {
    KandinskyV22CombinedPipeline: (4, _said),
    KandinskyV22Img2ImgCombinedPipeline: (4, _from_picture(_said)),
    KandinskyV22InpaintCombinedPipeline: (9, _inpainted(_said)),
}
_PRIORS: dict[Any, Any] = {
    KandinskyPriorPipeline: _of_text,
    KandinskyV22PriorPipeline: _of_text,
    KandinskyV22PriorEmb2EmbPipeline: _of_embedding,
}


def _decoder(kind: Any, build: Any, call: Any) -> Case:
    samples = 1 if "InpaintCombined" in kind.__name__ else 2
    return Case(name=kind.__name__, build=build, call=call, samples=samples, refused=NO_COLUMNS)


HERE = (
    *(_decoder(k, lambda k=k, c=c: _first(k, c), call) for k, (c, call) in _FIRSTS.items()),
    *(
        _decoder(k, lambda k=k, c=c: _first(k, c, **_prior_parts("prior_")), call)
        for k, (c, call) in _FIRSTS_COMBINED.items()
    ),
    *(_decoder(k, lambda k=k, c=c: _second(k, c), call) for k, (c, call) in _SECONDS.items()),
    *(_decoder(k, lambda k=k, c=c: _second(k, c, hinted=True), call) for k, (c, call) in _SECONDS_HINTED.items()),
    *(
        _decoder(k, lambda k=k, c=c: _second(k, c, **_prior_parts("prior_")), call)
        for k, (c, call) in _SECONDS_COMBINED.items()
    ),
    *(Case(name=k.__name__, build=lambda k=k: k(**_prior_parts()), call=call) for k, call in _PRIORS.items()),
)
