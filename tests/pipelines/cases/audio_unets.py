"""AudioLDM 2, whose UNet reads two texts."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AudioLDM2Pipeline, AudioLDM2UNet2DConditionModel, DDIMScheduler
from transformers import GPT2Config, GPT2LMHeadModel, SpeechT5HifiGan, SpeechT5HifiGanConfig, T5Config, T5EncoderModel

from tests.pipelines.case import Case
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized

_GENERATED, _TEXT = 12, 8


def _vocoder() -> SpeechT5HifiGan:
    config = SpeechT5HifiGanConfig(
        model_in_dim=64,
        sampling_rate=16000,
        upsample_initial_channel=8,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
    )
    return randomized(SpeechT5HifiGan(config))


def _second_encoder() -> T5EncoderModel:
    """Is asked for its kind and its precision only."""
    config = T5Config(vocab_size=10, d_model=_TEXT, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return randomized(T5EncoderModel(config))


def _language_model() -> GPT2LMHeadModel:
    """Is asked for its precision only."""
    return randomized(GPT2LMHeadModel(GPT2Config(vocab_size=10, n_positions=8, n_embd=8, n_layer=1, n_head=2)))


def _pipe() -> Any:
    unet = AudioLDM2UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=((None, _GENERATED, _TEXT), (None, _GENERATED, _TEXT)),  # type: ignore[arg-type]
        attention_head_dim=4,
        norm_num_groups=4,
    )
    texts = ("text_encoder", "tokenizer", "tokenizer_2", "feature_extractor")
    return AudioLDM2Pipeline(
        vae=kl_autoencoder(in_channels=1, out_channels=1),
        unet=randomized(unet),
        scheduler=DDIMScheduler(clip_sample=False),
        vocoder=_vocoder(),
        text_encoder_2=_second_encoder(),
        projection_model=None,  # type: ignore[arg-type]
        language_model=_language_model(),
        **dict.fromkeys(texts),  # type: ignore[arg-type]
    )


def _call(samples: int) -> dict[str, Any]:
    present = torch.ones(samples, 5, dtype=torch.long)
    present[:, 4] = 0
    return {
        "prompt_embeds": noise(samples, 5, _TEXT, seed=1),
        "negative_prompt_embeds": noise(samples, 5, _TEXT, seed=2),
        "generated_prompt_embeds": noise(samples, 3, _GENERATED, seed=3),
        "negative_generated_prompt_embeds": noise(samples, 3, _GENERATED, seed=4),
        "attention_mask": present,
        "negative_attention_mask": present.clone(),
        "audio_length_in_s": 0.02,
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
    }


HERE = (Case(name="AudioLDM2Pipeline", build=_pipe, call=_call),)
