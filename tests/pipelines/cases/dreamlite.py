"""DreamLite, whose UNet sees the picture that it makes beside the one that it edits."""

from __future__ import annotations

from typing import Any

from diffusers import DreamLiteMobilePipeline, DreamLitePipeline, DreamLiteUNetModel, FlowMatchEulerDiscreteScheduler

from tests.pipelines.case import Case
from tests.pipelines.unet_parts import clip_text, clip_tokenizer
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

_TEXT, _LENGTH = 12, 500


#: All queries read one head of keys.
_REFUSED = {"TensorParallel": "has 1 heads"}


def _pipe(kind: Any) -> Any:
    unet = DreamLiteUNetModel(
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=_TEXT,
        norm_num_groups=4,
        addition_embed_type="time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=8,
        ff_mult=2,
    )
    return kind(
        text_encoder=clip_text(_TEXT, length=_LENGTH),
        tokenizer=clip_tokenizer(_LENGTH),
        processor=None,
        vae=kl_autoencoder(),
        unet=randomized(unet),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def _call(samples: int) -> dict[str, Any]:
    return {
        "prompt": "a fox",
        "num_images_per_prompt": samples,
        "text_pad_embedding": noise(_TEXT, seed=1),
        "height": 96,
        "width": 64,
        "num_inference_steps": 2,
        "output_type": "latent",
    }


HERE = (
    # With guidance it makes no more than one picture: it tells its UNet the sizes of one only.
    Case(name="DreamLitePipeline", build=lambda: _pipe(DreamLitePipeline), call=_call, samples=1, refused=_REFUSED),
    Case(name="DreamLiteMobilePipeline", build=lambda: _pipe(DreamLiteMobilePipeline), call=_call, refused=_REFUSED),
)
