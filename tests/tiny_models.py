"""Tiny random models that tests of several parts build: their weights, autoencoders, language models, tokenizers.

Denoisers are built by the families of `tests.parallel`, UNets by `tests.parallel.unets` and `tests.pipelines.cases`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan, AutoencoderOobleck
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Seeded noise, the same in every process."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomize(model: Any, scale: float = 0.2) -> None:
    """Draws random weights everywhere, also where the class starts with zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)


def randomized(model: Any, dtype: torch.dtype = torch.float64, scale: float = 0.2) -> Any:
    """The model with seeded random weights everywhere."""
    torch.manual_seed(11)
    randomize(model, scale)
    return model.eval().to(dtype)


class KeepPrecision(TorchFunctionMode):
    """Leaves out the models' casts from float64 to float32, so that float64 can show that the sums are exact."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        cast = func in (Tensor.to, Tensor.float) and (args[0].dtype, output.dtype) == (torch.float64, torch.float32)
        return args[0] if cast else output


def kl_settings(blocks: int = 4, **changed: Any) -> dict[str, Any]:
    """Settings of an autoencoder whose latents of four channels are smaller: by two for each block but the first."""
    settings = {
        "block_out_channels": (4,) * blocks,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "layers_per_block": 1,
        "down_block_types": ("DownEncoderBlock2D",) * blocks,
        "up_block_types": ("UpDecoderBlock2D",) * blocks,
    }
    return settings | changed


def kl_autoencoder(**changed: Any) -> AutoencoderKL:
    """Eight times smaller latents of four channels."""
    return randomized(AutoencoderKL(**kl_settings(**changed)))


def flux2_autoencoder(**changed: Any) -> AutoencoderKLFlux2:
    """Eight times smaller latents of four channels, normed."""
    return randomized(AutoencoderKLFlux2(**kl_settings(**changed)))


def wan_settings(**changed: Any) -> dict[str, Any]:
    """Settings of an autoencoder of videos: eight times smaller, a frame for the first and one for every four more."""
    settings = {
        "base_dim": 3,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    return settings | changed


def qwen_autoencoder(**changed: Any) -> AutoencoderKLQwenImage:
    """Eight times smaller latents of four channels, with one frame."""
    return randomized(AutoencoderKLQwenImage(**wan_settings(base_dim=4, **changed)))


def wan_autoencoder(**changed: Any) -> AutoencoderKLWan:
    """Videos of four channels, eight times smaller, a frame for the first and one for every four after it."""
    return randomized(AutoencoderKLWan(**wan_settings(**changed)))


def oobleck_autoencoder() -> AutoencoderOobleck:
    """Sound in two channels, as four numbers for every two moments."""
    return randomized(
        AutoencoderOobleck(
            encoder_hidden_size=8,
            downsampling_ratios=[1, 2],
            channel_multiples=[1, 2],
            decoder_channels=4,
            decoder_input_channels=4,
            audio_channels=2,
            sampling_rate=8,
        )
    )


def causal_model(family: str = "llama", seed: int = 0, **changed: Any) -> Any:
    """A language model of two layers in float64."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    if family not in ("gpt2", "gpt_neox"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    if family in ("mistral", "qwen2", "qwen3"):
        sizes["sliding_window"] = None
    if family == "smollm3":
        sizes["no_rope_layers"] = [1, 0]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | changed)).double().eval()


def word_tokenizer(words: Sequence[str], split: Any, unknown: str = "<unk>", **named: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that finds words by `split` and knows some of them."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    inner.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=inner, **named)


def letter_tokenizer(words: Sequence[str], letter: Any = "") -> PreTrainedTokenizerFast:
    """Reads letter by letter, or what else stands for one, and writes them without spaces."""
    split = pre_tokenizers.Split(letter, "isolated")
    made = word_tokenizer(words, split, "<pad>", eos_token="<eos>", pad_token="<pad>")
    made.backend_tokenizer.decoder = decoders.Fuse()
    return made
