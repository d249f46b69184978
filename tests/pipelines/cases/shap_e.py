"""Shap-E, a prior that makes shapes; and pipelines that have no denoiser at all."""

from __future__ import annotations

from typing import Any

from diffusers import HeunDiscreteScheduler, PriorTransformer, ShapEImg2ImgPipeline, ShapEPipeline
from transformers import CLIPTextModelWithProjection, CLIPVisionModel

from tests.pipelines.case import Case
from tests.pipelines.unet_parts import clip_pictures, clip_text, clip_tokenizer, clip_vision, photo
from tests.tiny_models.weights import randomized

_WIDTH = 8


def _pipe(kind: Any, encoder_hid: dict[str, Any], **more: Any) -> Any:
    settings: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "embedding_dim": 6,
        "num_embeddings": 7,
        "additional_embeddings": 0,
        "embedding_proj_dim": _WIDTH,
        "time_embed_dim": 8,
        "num_layers": 1,
        "clip_embed_dim": 12,
        "time_embed_act_fn": "gelu",
        "norm_in_type": "layer",
        "encoder_hid_proj_type": None,
        "added_emb_type": None,
    }
    scheduler = HeunDiscreteScheduler(beta_schedule="exp", prediction_type="sample", clip_sample=False)
    prior = randomized(PriorTransformer(**settings | encoder_hid))
    return kind(prior=prior, scheduler=scheduler, shap_e_renderer=None, **more)


def _from_text() -> Any:
    text = {"text_encoder": clip_text(_WIDTH, CLIPTextModelWithProjection), "tokenizer": clip_tokenizer()}
    return _pipe(ShapEPipeline, {"additional_embeddings": 2}, **text)


def _from_picture() -> Any:
    picture = {"image_encoder": clip_vision(_WIDTH, kind=CLIPVisionModel), "image_processor": clip_pictures()}
    return _pipe(ShapEImg2ImgPipeline, {"additional_embeddings": 5, "embedding_proj_norm_type": "layer"}, **picture)


def _call(samples: int) -> dict[str, Any]:
    return {
        "num_images_per_prompt": samples,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "output_type": "latent",
    }


HERE = (
    Case(
        name="ShapEPipeline",
        build=_from_text,
        call=lambda samples: _call(samples) | {"prompt": "a fox"},
    ),
    Case(
        name="ShapEImg2ImgPipeline",
        build=_from_picture,
        call=lambda samples: _call(samples) | {"image": photo(32)},
    ),
)

LEFT = {
    "DiffusionPipeline": "the base class of all pipelines has no call of its own",
    "FluxPriorReduxPipeline": "it encodes pictures and texts once; there is no denoiser and no step",
    "LTXLatentUpsamplePipeline": "one convolutional network enlarges latents in one call; there is no denoiser",
    "LTX2LatentUpsamplePipeline": "one convolutional network enlarges latents in one call; there is no denoiser",
}
