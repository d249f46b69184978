"""Starts recipes from the shipped `shapes`: its models, and scenes that are encoded once.

Importing this module loads torch; only recipes import it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.zoo import load
from partsong_zoo.shapes.drawing import paint
from partsong_zoo.shapes.model import Generator, vae_loss
from partsong_zoo.shapes.scenes import Thing, draw_things, generator
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.stage import Loss

__all__ = [
    "autoencoder_loss",
    "build_pool",
    "draw_scenes",
    "encode",
    "load_pool",
    "pictures",
    "rank_pool",
    "restored_quality",
    "shipped_model",
]

_AT_A_TIME = 64
#: To recognise a pool, this many scenes are encoded again; a latent may be off by this much, as processors round.
_COMPARED, _ROUNDING = 4, 0.1


def draw_scenes(num: int, *key: int) -> list[list[Thing]]:
    """Draws scenes, the same at every call with a key."""
    return [draw_things(generator(*key, index)) for index in range(num)]


def pictures(scenes: Sequence[Sequence[Thing]]) -> Tensor:
    """Draws scenes: `[batch, 3, 64, 64]` in [-1, 1]."""
    array = np.stack([paint(list(things)) for things in scenes])
    return torch.from_numpy(array).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def autoencoder_loss(vae: Any, world: World, batch: int) -> Loss:
    """Returns the loss of an autoencoder on `batch` fresh pictures a step, with their PSNR for the log."""

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        images = pictures([draw_things(rng) for _ in range(batch)]).to(world.device)
        # Convolutions this narrow gain nothing from bfloat16 on a CPU.
        with mixed_precision(world, enabled=world.device.type == "cuda"):
            loss, mse = vae_loss(vae, images.contiguous(memory_format=torch.channels_last))
        return loss, f"psnr {10 * math.log10(4 / mse):.1f} dB"

    return loss_of


@torch.no_grad()
def restored_quality(vae: Any, images: Tensor) -> float:
    """Returns the mean PSNR in dB of pictures that an autoencoder encoded and decoded."""
    restored = vae.decode(vae.encode(images).latent_dist.mean).sample.clamp(-1, 1)
    return float((10 * torch.log10(4 / (restored - images).square().mean(dim=(1, 2, 3)))).mean())


def rank_pool(out: Path, world: World) -> Path:
    """Names the file of this rank's encoded scenes."""
    return out / f"pool-{world.rank}-of-{world.size}.npy"


@torch.no_grad()
def encode(vae: Any, scenes: Sequence[Sequence[Thing]]) -> NDArray[np.float16]:
    """Draws pictures of scenes and encodes them: normalised latents `[scenes, 4, 16, 16]`."""
    mean = vae.encode(pictures(scenes).to(vae.device)).latent_dist.mean
    return ((mean - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor).cpu().half().numpy()


def build_pool(path: Path, scenes: Sequence[Sequence[Thing]], world: World, vae: Any = None) -> None:
    """Writes the latents of scenes to a file, unless it is there; those of the shipped autoencoder if `vae` is None."""
    if path.exists():
        return
    vae, parts = (load("shapes").vae if vae is None else vae).to(world.device), []
    for first in range(0, len(scenes), _AT_A_TIME):
        parts.append(encode(vae, scenes[first : first + _AT_A_TIME]))
        if first % (100 * _AT_A_TIME) == 0:
            world.say(f"pool {first} of {len(scenes)}")
    # A file with the final name is always complete.
    with path.with_suffix(".new").open("wb") as file:
        np.save(file, np.concatenate(parts))
    path.with_suffix(".new").replace(path)


def load_pool(path: Path, scenes: Sequence[Sequence[Thing]]) -> NDArray[np.float16]:
    """Loads the latents `[scenes, 4, 16, 16]` that `build_pool` wrote.

    Args:
        path: the file.
        scenes: what it should show.

    Raises:
        ArgumentError: there is no such file, or it shows other scenes.
    """
    if not path.exists():
        raise ArgumentError(f"no {path}; run the stage 'pool' first")
    latents = np.load(path)
    first = encode(load("shapes").vae, scenes[:_COMPARED]).astype(np.float32)
    if len(latents) != len(scenes) or np.abs(latents[:_COMPARED].astype(np.float32) - first).max() > _ROUNDING:
        raise ArgumentError(
            f"{path} holds {len(latents)} scenes and shows others than the {len(scenes)} of this seed and pool_size; "
            "use those that it was made with, or another folder"
        )
    return latents


def shipped_model(world: World) -> Generator:
    """Returns the shipped transformer and its text encoders as recipes run them, all frozen."""
    pipeline, model = load("shapes"), Generator()
    model.text.first, model.text.second = pipeline.text_encoder, pipeline.text_encoder_2
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    return model.requires_grad_(False).to(world.device)
