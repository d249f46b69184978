"""Parts that many tiny pipelines share: autoencoders, text encoders and tokenizers."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from tests.tiny_models.weights import noise


def coarse(vae: Any) -> Any:
    """Lets an autoencoder look at every eighth pixel, for pipelines that make a megapixel of any given picture."""
    kind = type(vae)
    encode = lambda self, x, **more: kind.encode(self, x[..., ::8, ::8], **more)  # noqa: E731
    vae.__class__ = type(f"Coarse{kind.__name__}", (kind,), {"encode": encode})
    return vae


class Absent(nn.Module):
    """Stands for a text encoder that is never called, where a pipeline reads its type."""

    dtype, device, image_processor = torch.float64, torch.device("cpu"), None


def prompts(samples: int, **more: Any) -> dict[str, Any]:
    """Prompts as embeddings, and two steps of a small picture or video."""
    texts = {"prompt_embeds": noise(samples, 7, 12, seed=1), "negative_prompt_embeds": noise(samples, 7, 12, seed=2)}
    return {**texts, "num_inference_steps": 2, "output_type": "latent", "height": 48, "width": 80, **more}


def pil_picture(width: int = 80, height: int = 48, seed: int = 5, mode: str = "RGB") -> Image.Image:
    """A picture of random pixels."""
    pixels = noise(height, width, len(mode), seed=seed).sigmoid().mul(255).byte()
    return Image.fromarray(pixels.squeeze(-1).numpy(), mode)


def picture(samples: int, height: int = 48, width: int = 80, seed: int = 5) -> Tensor:
    """Pictures of random pixels between 0 and 1."""
    return noise(samples, 3, height, width, seed=seed).sigmoid()


def half_mask(samples: int, height: int = 48, width: int = 80) -> Tensor:
    """Masks that are one in the lower half."""
    mask = torch.zeros(samples, 1, height, width, dtype=torch.float64)
    mask[..., height // 2 :, :] = 1
    return mask


class Letters:
    """A tokenizer that gives every letter a number, for pipelines that insist on text."""

    pad_token_id = 0

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        """What is said, without a frame around it."""
        return messages[0]["content"][0]["text"]

    def __call__(self, text: str, **options: Any) -> dict[str, Tensor]:
        """One row of numbers."""
        return {"input_ids": torch.tensor([[1 + ord(letter) % 31 for letter in text]])}
