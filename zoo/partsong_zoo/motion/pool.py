"""Encodes clips once for the recipe, and keeps its autoencoder's statistics. Importing this module loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from partsong.errors import ArgumentError
from partsong_zoo.motion.clips import decode_clip, encode_clip
from partsong_zoo.motion.drawing import paint
from partsong_zoo.motion.grammar import training_scene, write
from partsong_zoo.motion.training import Clip, ClipPool, draw_clips
from partsong_zoo.motion.world import generator, layout
from partsong_zoo.training.common import World
from partsong_zoo.training.stage import read_average

__all__ = ["DROPPED", "KEPT", "build_pool", "draw_clip", "load_autoencoder", "load_pool", "settle_statistics"]

#: How many latents of a pool clip are kept, and how many are dropped before them: the first ones know they are first.
KEPT, DROPPED = 16, 3
#: Clips that are encoded together.
_AT_A_TIME = 8


@torch.no_grad()
def settle_statistics(vae: Any, seed: int) -> tuple[float, int]:
    """Puts the latents' means and deviations into an autoencoder's configuration.

    Returns:
        Its quality on new videos in dB, and how many videos these were.
    """
    video = draw_clips(generator(71, seed), 24, 1 + 4 * 9).to(vae.device)
    mean = encode_clip(vae, video).chunk(2, dim=1)[0][:, :, DROPPED:]
    error = decode_clip(vae, mean).clamp(-1, 1) - video[:, :, 2 * DROPPED :]
    latents = mean.transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(dim=1).tolist(), latents_std=latents.std(dim=1).tolist())
    return float((10 * torch.log10(4 / error.square().mean(dim=(1, 2, 3, 4)))).mean()), len(video)


def load_autoencoder(out: Path) -> Any:
    """Loads the autoencoder in `vae/`, with the decoder of `decoder.pt` if that was trained."""
    vae: Any = AutoencoderKLWan.from_pretrained(out / "vae")
    if (path := out / "decoder.pt").exists():
        for number, part in enumerate((vae.decoder, vae.post_quant_conv)):
            part.load_state_dict(read_average(path, str(number)))
    return vae


def draw_clip(seed: int, rank: int, index: int, pairs: float) -> Clip:
    """Draws a clip of a rank's share, with two objects in a share `pairs` of all."""
    rng = generator(72, seed, rank, index)
    scene = training_scene(rng, pairs)
    return scene, layout(scene, rng)


@torch.no_grad()
def build_pool(out: Path, clips: list[Clip], world: World) -> None:
    """Encodes a rank's clips into a file, float16 and normalised, unless it is there; a file beside it describes them.

    Args:
        out: the folder for it, in which the autoencoder is.
        clips: the clips.
        world: the ranks.
    """
    path = _path(out, world)
    if path.exists():
        return
    vae = load_autoencoder(out).to(world.device)
    measured = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(values).to(world.device)[:, None, None, None] for values in measured)
    parts, num_frames = [], 1 + 2 * (KEPT + DROPPED - 1)
    for first in range(0, len(clips), _AT_A_TIME):
        videos = np.stack([paint(movers, num_frames) for _, movers in clips[first : first + _AT_A_TIME]])
        pixels = torch.from_numpy(videos).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0
        latents = encode_clip(vae, pixels.to(world.device)).chunk(2, dim=1)[0][:, :, DROPPED:]
        parts.append(((latents - mean) / std).half().cpu().numpy())
        if first % (100 * _AT_A_TIME) == 0:
            world.say(f"pool {first} of {len(clips)}")
    path.with_suffix(".txt").write_text(_shown(clips), encoding="utf-8")
    np.save(path, np.concatenate(parts))


def load_pool(out: Path, clips: list[Clip], world: World) -> ClipPool:
    """Loads a rank's clips.

    Args:
        out: the folder in which `build_pool` put them.
        clips: the clips that should be there.
        world: the ranks.

    Raises:
        ArgumentError: other clips are there.
    """
    path = _path(out, world)
    if path.with_suffix(".txt").read_text(encoding="utf-8") != _shown(clips):
        raise ArgumentError(
            f"{path} holds other clips than this seed, pool_size and pairs draw; "
            "use those that it was encoded with, or another folder"
        )
    return ClipPool(torch.from_numpy(np.load(path)), clips, DROPPED, world.device)


def _path(out: Path, world: World) -> Path:
    return out / f"pool-{world.rank}-of-{world.size}.npy"


def _shown(clips: list[Clip]) -> str:
    return "".join(f"{write(scene)}\n" for scene, _ in clips)
