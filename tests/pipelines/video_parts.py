"""Parts that many tiny video and audio pipelines share: autoencoders, encoders and tokenizers."""

from __future__ import annotations

import numpy as np
import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
)
from PIL import Image
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.tiny_models.text import word_tokenizer
from tests.tiny_models.weights import randomized


def clip_vision(width: int = 32) -> CLIPVisionModel:
    """A vision tower that sees pictures as five tokens."""
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return randomized(CLIPVisionModel(config))


def pictures(count: int, height: int = 48, width: int = 80) -> list[Image.Image]:
    """Seeded noise as pictures."""
    noise = np.random.default_rng(7).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(frame) for frame in noise]


def hunyuan_video_autoencoder() -> AutoencoderKLHunyuanVideo:
    """Videos of four channels, eight times smaller, a frame for the first and one for every four after it."""
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    return randomized(vae)


def hunyuan_video_15_autoencoder() -> AutoencoderKLHunyuanVideo15:
    """Videos of four channels, sixteen times smaller."""
    return randomized(
        AutoencoderKLHunyuanVideo15(latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1)
    )


_LTX = {
    "latent_channels": 4,
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 8, 8, 8),
}


def ltx_autoencoder() -> AutoencoderKLLTXVideo:
    """Videos of four channels, 32 times smaller, a frame for the first and one for every eight after it."""
    return randomized(AutoencoderKLLTXVideo(**_LTX))


def ltx2_autoencoder() -> AutoencoderKLLTX2Video:
    """Videos of four channels, 32 times smaller, a frame for the first and one for every eight after it."""
    decoder = {"decoder_block_out_channels": (8, 8, 8), "decoder_layers_per_block": (1, 1, 1, 1)}
    decoder |= {"spatial_compression_ratio": 32, "temporal_compression_ratio": 8}
    return randomized(AutoencoderKLLTX2Video(**_LTX | decoder))


def ltx2_audio_autoencoder() -> AutoencoderKLLTX2Audio:
    """Sound as eight features per moment: two channels of four bins."""
    return randomized(
        AutoencoderKLLTX2Audio(base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=16)
    )


def siglip_vision(width: int = 8) -> SiglipVisionModel:
    """A vision tower that sees pictures as four tokens."""
    config = SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return randomized(SiglipVisionModel(config))


def siglip_vision_processor() -> SiglipImageProcessor:
    """What prepares pictures for `siglip_vision`."""
    return SiglipImageProcessor(size={"height": 16, "width": 16})


def kept(samples: int, words: int = 7, present: int = 5) -> Tensor:
    """A mask of texts that begin with some words, and more in the first sample."""
    mask = torch.zeros(samples, words, dtype=torch.int64)
    mask[:, :present] = 1
    mask[0, : present + 1] = 1
    return mask


def cogvideox_autoencoder() -> AutoencoderKLCogVideoX:
    """Videos of four channels, eight times smaller, a frame for the first and one for every four after it."""
    return randomized(
        AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
        )
    )


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer that reads letter by letter."""
    characters = ["<pad>", "</s>", "<unk>", *map(chr, range(32, 127))]
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return word_tokenizer(characters, pre_tokenizers.Split("", "isolated"), **names, model_max_length=64)


_T5 = {"vocab_size": 98, "d_model": 12, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 3}


def t5_encoder() -> T5EncoderModel:
    """A text encoder of width twelve, for `letters`."""
    return randomized(T5EncoderModel(T5Config(**_T5)))


def umt5_encoder() -> UMT5EncoderModel:
    """A text encoder of width twelve, for `letters`."""
    return randomized(UMT5EncoderModel(UMT5Config(**_T5)))


def qwen3_encoder() -> Qwen3Model:
    """A causal text encoder of width twelve, for `letters`."""
    config = Qwen3Config(
        vocab_size=98,
        hidden_size=12,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=4,
    )
    return randomized(Qwen3Model(config))
