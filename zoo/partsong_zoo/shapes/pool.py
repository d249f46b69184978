"""Starts recipes from the shipped `shapes`: its models, and scenes that are encoded once.

Importing this module loads torch; only recipes import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong.zoo import load
from partsong_zoo.shapes.drawing import paint
from partsong_zoo.shapes.model import Generator
from partsong_zoo.shapes.scenes import Thing, draw_things, generator
from partsong_zoo.training.common import World

__all__ = ["build_pool", "draw_scenes", "encode", "load_pool", "shipped_model"]

_AT_A_TIME = 64
#: So many scenes are encoded again to know a pool by, and so far a latent may be off, as another processor rounds.
_COMPARED, _ROUNDING = 4, 0.1


def draw_scenes(num: int, *key: int) -> list[list[Thing]]:
    """Draws scenes, the same at every call with a key."""
    return [draw_things(generator(*key, index)) for index in range(num)]


@torch.no_grad()
def encode(vae: Any, scenes: Sequence[Sequence[Thing]]) -> NDArray[np.float16]:
    """Draws pictures of scenes and encodes them: normalised latents `[scenes, 4, 16, 16]`."""
    array = np.stack([paint(list(things)) for things in scenes])
    images = torch.from_numpy(array).permute(0, 3, 1, 2).float() / 127.5 - 1.0
    mean = vae.encode(images.to(vae.device)).latent_dist.mean
    return ((mean - vae.config.shift_factor) * vae.config.scaling_factor).cpu().half().numpy()


def build_pool(path: Path, scenes: Sequence[Sequence[Thing]], world: World) -> None:
    """Writes the latents of scenes to a file, unless it is there."""
    if path.exists():
        return
    vae, parts = load("shapes").vae.to(world.device), []
    for first in range(0, len(scenes), _AT_A_TIME):
        parts.append(encode(vae, scenes[first : first + _AT_A_TIME]))
        if first % (100 * _AT_A_TIME) == 0:
            world.say(f"pool {first} of {len(scenes)}")
    # A file under the last name is always whole.
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
