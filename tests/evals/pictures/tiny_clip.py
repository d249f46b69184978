"""A tiny random CLIP model, as a folder of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from tests.pipelines.unet_parts import clip_tokenizer

#: Side of the pictures that it sees, and how many tokens it reads.
SIDE, LENGTH = 32, 12


def save_clip(folder: Path) -> Path:
    """Writes the model, its tokenizer of letters and what prepares its pictures."""
    tokenizer = clip_tokenizer(LENGTH)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts = {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 1}
    config = CLIPConfig(
        text_config={**sizes, **texts, "pad_token_id": 1},
        vision_config={**sizes, "image_size": SIDE, "patch_size": 8},
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = CLIPModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return folder
