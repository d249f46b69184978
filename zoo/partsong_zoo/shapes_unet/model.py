"""Builds the parts of the `shapes-unet` pipeline for the recipe; loading the shipped folder does not need this file.

Every part is a stock class of diffusers or transformers with a small configuration, so the saved folder loads without
this package. Importing this module loads torch.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from partsong_zoo.shapes.grammar import WORDS
from partsong_zoo.shapes.model import SPECIAL, TEXT_LENGTH, TEXT_WIDTH, clip_config
from partsong_zoo.shapes_unet.positions import PositionReadout

_HEAD_WIDTH = 32
_END = "</w>"


@torch.no_grad()
def fold_statistics(vae: Any, mean: Tensor, std: Tensor) -> None:
    """Makes every latent channel zero-mean and of unit variance without changing what the autoencoder decodes.

    The Stable Diffusion pipeline knows one scale for all channels and no shift, so both go into the 1 x 1
    convolutions before and after the latent.

    Args:
        vae: An AutoencoderKL, changed in place.
        mean: The latents' mean per channel, `[channels]`.
        std: Their standard deviation, `[channels]`.
    """
    inward, outward = vae.quant_conv, vae.post_quant_conv
    # The first rows of the inward convolution give the posterior's mean, the others the logarithm of its variance.
    scale, shift = torch.cat([1 / std, torch.ones_like(std)]), torch.cat([-mean / std, -2 * std.log()])
    inward.weight.mul_(scale[:, None, None, None])
    inward.bias.mul_(scale).add_(shift)
    outward.bias.add_(outward.weight[:, :, 0, 0] @ mean)
    outward.weight.mul_(std[None, :, None, None])


def build_unet(width: int = 64, depth: int = 2) -> Any:
    """Builds the UNet: 16 x 16 and 8 x 8, both with ResNet blocks, self-attention and cross-attention to the text.

    Args:
        width: Channels at 16 x 16, a multiple of 32; twice as many at 8 x 8.
        depth: Transformer layers per attention at 8 x 8, where they are cheap; one at 16 x 16.
    """
    # The signature names tuples of one, but any length works. `attention_head_dim` counts heads.
    widths: Any = (width, 2 * width)
    heads: Any = tuple(w // _HEAD_WIDTH for w in widths)
    down: Any = ("CrossAttnDownBlock2D",) * 2
    up: Any = ("CrossAttnUpBlock2D",) * 2
    layers: Any = (1, depth)
    unet = UNet2DConditionModel(
        sample_size=16,
        down_block_types=down,
        up_block_types=up,
        block_out_channels=widths,
        layers_per_block=1,
        transformer_layers_per_block=layers,
        attention_head_dim=heads,
        cross_attention_dim=TEXT_WIDTH,
        norm_num_groups=16,
        use_linear_projection=True,
    )
    # Every residual branch starts as zero, as is usual for diffusion UNets; the stock class does not do that.
    for module in unet.modules():
        if isinstance(module, ResnetBlock2D):
            _silence(module.conv2)
        elif isinstance(module, Transformer2DModel):
            _silence(module.proj_out)
    _silence(unet.conv_out)
    return unet


def _silence(layer: Any) -> None:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


def build_scheduler() -> DDIMScheduler:
    """Builds the noise schedule of training and sampling: velocities, and zero signal at the last step.

    It is Stable Diffusion's schedule with a stronger end. It spends more steps at high noise, where a picture this
    small decides how many objects there are and where.
    """
    return DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.02,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        steps_offset=1,
    )


def draw_timesteps(num: int, rng: np.random.Generator, lean: float = 0.0) -> Tensor:
    """Draws training timesteps `[num]`: logit-normal, a fifth uniform.

    Args:
        num: how many.
        rng: draws them.
        lean: the mean of the normal; above 0 more of them are noisy, where layouts are decided.
    """
    normal = lean + rng.standard_normal(num)
    level = np.where(rng.random(num) < 0.2, rng.random(num), 1 / (1 + np.exp(-normal)))
    return torch.from_numpy(np.minimum(1000 * level, 999).astype(np.int64))


class TextEncoder(nn.Module):
    """Runs the CLIP text encoder as the Stable Diffusion pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        # Pieces of words are tokens too: a caption of other words has them, and should be drawn like any other.
        config = clip_config(TEXT_WIDTH, layers=2, heads=TEXT_WIDTH // _HEAD_WIDTH, tokens=len(build_tokenizer()))
        self.clip = CLIPTextModel(config)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Computes token features `[batch, 20, 192]`, and the end token's `[batch, 192]`, which only training reads."""
        out = self.clip(ids)
        return out.last_hidden_state, out.pooler_output


class Painter(nn.Module):
    """Joins the UNet, its text encoder and the read-outs of positions, which are trained together."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.text = TextEncoder()
        self.unet = build_unet(width, depth)
        self.positions = PositionReadout(self.unet)

    def forward(self, noisy: Tensor, timesteps: Tensor, ids: Tensor) -> Tensor:
        """Computes the velocity `[batch, 4, 16, 16]` for noisy latents and captions."""
        tokens, _ = self.text(ids)
        return self.unet(noisy, timesteps, encoder_hidden_states=tokens).sample


def build_tokenizer() -> CLIPTokenizer:
    """Builds a CLIP tokenizer with one token per word of the grammar, and the ids of the `shapes` tokenizer."""
    merges = _merges([*WORDS])
    pieces = {piece for left, right in merges for piece in (left, right, left + right)}
    words = [word + _END for word in WORDS]
    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *words, *sorted(pieces - set(words))])}
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=TEXT_LENGTH, **names)


def _merges(words: list[str]) -> list[Any]:
    """Learns byte-pair merges until every word is one piece; learnt in order, they cannot get in each other's way."""
    split = [[*word[:-1], word[-1] + _END] for word in words]
    merges: list[Any] = []
    while pairs := Counter(pair for pieces in split for pair in pairwise(pieces)):
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append((left, right))
        for pieces in split:
            for index in range(len(pieces) - 1, 0, -1):
                if pieces[index - 1 : index + 1] == [left, right]:
                    pieces[index - 1 : index + 1] = [left + right]
    return merges
