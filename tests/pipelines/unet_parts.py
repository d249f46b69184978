"""Parts that many tiny pipelines with UNets share: text and picture encoders, tokenizers, priors."""

from __future__ import annotations

from typing import Any

from diffusers import PriorTransformer
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

from tests.tiny_models.weights import noise, randomized

_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def clip_tokenizer(length: int = 6) -> CLIPTokenizer:
    """Reads letters; a prompt has `length` tokens with its start and end."""
    words = ["<|startoftext|>", "<|endoftext|>", *_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def clip_text(width: int, kind: Any = CLIPTextModel, length: int = 6, **changed: Any) -> Any:
    """Encodes the tokens of `clip_tokenizer`; its hidden states have `width` channels."""
    settings: dict[str, Any] = {
        "vocab_size": 2 + 2 * len(_LETTERS),
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": length,
        "projection_dim": width,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return randomized(kind(CLIPTextConfig(**settings | changed)))


def clip_vision(width: int, size: int = 32, kind: Any = CLIPVisionModelWithProjection) -> Any:
    """Encodes pictures of `size` x `size` as one embedding of `width` numbers."""
    config = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=size,
        patch_size=size // 2,
        projection_dim=width,
    )
    return randomized(kind(config))


def clip_pictures(size: int = 32) -> CLIPImageProcessor:
    """Prepares pictures for `clip_vision`."""
    return CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def prior(width: int, tokens: int = 6, **changed: Any) -> PriorTransformer:
    """Makes an image's embedding of `width` numbers from a text's."""
    settings: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "embedding_dim": width,
        "num_embeddings": tokens,
        "additional_embeddings": 4,
        "num_layers": 1,
    }
    return randomized(PriorTransformer(**settings | changed))


def photo(size: int, seed: int = 5) -> Image.Image:
    """A square picture of noise."""
    return Image.fromarray(noise(size, size, 3, seed=seed).sigmoid().mul(255).byte().numpy())
