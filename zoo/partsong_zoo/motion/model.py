"""Builds the parts of the `motion` pipelines for the recipe; loading the shipped folders does not need this file.

Every part is a stock class of diffusers or transformers with a small configuration, so the saved folders load without
this package. Importing this module loads torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    SkyReelsV2Transformer3DModel,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from partsong_zoo.few_steps import build_few_step_scheduler
from partsong_zoo.motion.clips import decode_clip, encode_clip
from partsong_zoo.motion.grammar import WORDS

SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = {word: index for index, word in enumerate(SPECIAL + WORDS)}
#: Tokens per caption: the longest sentence of the grammar with its end, rounded up.
TEXT_LENGTH = 24
TEXT_WIDTH = 128
LATENT_CHANNELS = 4
#: Latent frames per block of `motion-causal`; a block makes twice as many frames.
BLOCK = 4
#: The scheduler's shift towards noise, since neighbouring frames of a video reveal much of each other.
SHIFT = 5.0


def build_vae(channels: int = 16) -> Any:
    """Builds an AutoencoderKLWan that halves space twice and time once: frame t is in latent (t + 1) // 2."""
    return AutoencoderKLWan(
        base_dim=channels,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        is_residual=True,
        scale_factor_temporal=2,
        scale_factor_spatial=4,
    )


def vae_loss(vae: Any, video: Tensor, first: int, num: int) -> tuple[Tensor, float]:
    """Computes the loss of reconstructing latents `first` to `first + num`, decoded as if the video began there.

    So a block of latents from anywhere can be decoded alone: its first latent gives one frame, the later of its two.
    There is a little latent noise (as the sampler's errors will be decoded) and a weak KL term.

    Returns:
        The loss, and the mean squared error.
    """
    mean, log_variance = encode_clip(vae, video).chunk(2, dim=1)
    log_variance = log_variance.clamp(-30, 20)
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=(1, 2, 3, 4)).mean()
    loss, mse = decoder_loss(vae, mean, video, first, num, noise=(0.5 * log_variance).exp())
    # The weight of the KL term is per latent of 8 x 8.
    return loss + 1e-5 * divergence / (64 * mean.shape[2]), mse


def decoder_loss(
    vae: Any, mean: Tensor, video: Tensor, first: int, num: int, noise: Tensor | float = 0.0
) -> tuple[Tensor, float]:
    """Computes the reconstruction part of `vae_loss` from latents `mean`, for training the decoder alone."""
    latent = mean + (noise + 0.05 * mean.detach().std()) * torch.randn_like(mean)
    frames = video[:, :, 2 * first : 2 * (first + num) - 1]
    error = decode_clip(vae, latent[:, :, first : first + num]).float() - frames
    mse = error.square().mean()
    return error.abs().mean() + 2.0 * mse, float(mse.detach())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per word of the grammar and one at the end; unknown words become `<unk>`."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=TEXT_LENGTH, **names)


def token_ids(captions: list[str]) -> Tensor:
    """Encodes the grammar's own sentences as the tokenizer does, padded to `TEXT_LENGTH`, but faster."""
    ids = torch.zeros(len(captions), TEXT_LENGTH, dtype=torch.long)
    for row, caption in enumerate(captions):
        words = [*(VOCABULARY[w] for w in caption.replace(",", " ,").split()), 1]
        ids[row, : len(words)] = torch.tensor(words)
    return ids


def build_text_encoder(layers: int = 3) -> UMT5EncoderModel:
    """Builds a UMT5 encoder over the grammar's words."""
    config = UMT5Config(
        vocab_size=len(VOCABULARY),
        d_model=TEXT_WIDTH,
        d_kv=32,
        d_ff=2 * TEXT_WIDTH,
        num_layers=layers,
        num_heads=TEXT_WIDTH // 32,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return UMT5EncoderModel(config)


def encode_text(encoder: Any, ids: Tensor) -> Tensor:
    """Computes token features `[batch, length, 128]`, zeros for padding, as the pipelines do."""
    mask = ids != 0
    return encoder(ids, mask).last_hidden_state * mask[..., None]


def _sizes(heads: int, depth: int) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 32,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 128,
        "ffn_dim": 96 * heads,
        "num_layers": depth,
    }


def build_transformer(heads: int = 6, depth: int = 6) -> Any:
    """Builds the video transformer: 16 tokens per latent frame, rotary positions."""
    model: Any = WanTransformer3DModel(**_sizes(heads, depth))
    # Every block starts as the identity and the output as zero, as is usual for diffusion transformers.
    with torch.no_grad():
        for block in model.blocks:
            block.scale_shift_table.zero_()
            nn.init.zeros_(block.attn2.to_out[0].weight)
            nn.init.zeros_(block.attn2.to_out[0].bias)
        nn.init.zeros_(model.condition_embedder.time_proj.weight)
        nn.init.zeros_(model.condition_embedder.time_proj.bias)
        nn.init.zeros_(model.proj_out.weight)
        nn.init.zeros_(model.proj_out.bias)
    return model


def build_causal_transformer(heads: int = 6, depth: int = 6, block: int = BLOCK) -> Any:
    """Builds the same transformer, configured so that `block` latent frames see themselves and earlier blocks."""
    return SkyReelsV2Transformer3DModel(**_sizes(heads, depth), num_frame_per_block=block)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Builds the noise schedule of training and sampling: rectified flow, shifted towards noise."""
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


def draw_sigmas(num: int, rng: np.random.Generator) -> Tensor:
    """Draws noise levels `[num]`: logit-normal (a fifth uniform), shifted towards noise as the scheduler's are."""
    level = np.where(rng.random(num) < 0.2, rng.random(num), 1 / (1 + np.exp(-rng.standard_normal(num))))
    return torch.from_numpy((SHIFT * level / (1 + (SHIFT - 1) * level)).astype(np.float32))


def build_pipeline(animator: Any, vae: Any) -> WanPipeline:
    """Builds a Wan pipeline.

    A causal transformer, of SkyReels-V2, goes into a Wan pipeline, too: it is called in the same way, and its own
    pipeline runs only if the package ftfy is installed.

    Args:
        animator: A transformer and its text encoder.
        vae: The autoencoder.
    """
    causal = isinstance(animator.transformer, SkyReelsV2Transformer3DModel)
    scheduler: Any = build_few_step_scheduler(SHIFT) if causal else build_scheduler()
    tokenizer: Any = build_tokenizer()
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=animator.text,
        vae=vae,
        scheduler=scheduler,
        transformer=animator.transformer,
    )
