"""Shows what latents look like without an autoencoder, by a linear map to colours that is fitted once."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from partsong.errors import PartsongError
from partsong.outputs import rgb_bytes
from partsong.samplers.structure_guidance.estimates import Prediction
from partsong.samplers.structure_guidance.pictures import form_of

__all__ = ["LatentColours", "shown_at"]

#: Sides of the pictures that the map is fitted to, in latents, and their number.
_SIDE, _NUM = 16, 8


class LatentColours:
    """Maps the latents of an autoencoder to colours, one matrix for all places.

    The matrix comes from pictures of coloured blocks and slopes: what the autoencoder encodes them to, against their
    own colours averaged over the square that a latent stands for.

    Args:
        pipe: a diffusers pipeline with an autoencoder for pictures.

    Raises:
        ValueError: its autoencoder has no encoder, or its latents are not scaled in a known way.
    """

    def __init__(self, pipe: Any) -> None:
        vae = pipe.vae
        self._factor = int(pipe.vae_scale_factor)
        pictures = _pictures(self._factor * _SIDE).to(vae.device, vae.dtype)
        with torch.no_grad():
            encoded = vae.encode(pictures * 2 - 1)
        latents = encoded.latent_dist.mean if hasattr(encoded, "latent_dist") else encoded.latents
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        latents = (latents - shift) * vae.config.scaling_factor
        colours = F.adaptive_avg_pool2d(pictures, latents.shape[-2:])
        rows = latents.movedim(1, -1).flatten(0, -2).double()
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
        self._map = torch.linalg.lstsq(rows, colours.movedim(1, -1).flatten(0, -2).double()).solution

    def show(self, latents: Tensor) -> Tensor:
        """Returns the colours `[B, 3, h, w]` in [0, 1] of latents `[B, C, h, w]`."""
        rows = latents.movedim(1, -1).double()
        colours = rows @ self._map[:-1].to(rows.device) + self._map[-1].to(rows.device)
        return colours.movedim(-1, 1).clamp(0, 1).float()

    def preview(self, pipe: Any, named: dict[str, Any], sample: str, last: tuple[Any, Any, Any]) -> tuple[bytes, ...]:
        """Returns PNG files of what the pictures of a call look like by now; empty where nobody can tell.

        Args:
            pipe: the pipeline of the call, whose scheduler has made a step.
            named: arguments of the denoiser's call that follows.
            sample: the one with the latents.
            last: what the scheduler was given: prediction, timestep and sample.
        """
        output, timestep, latents = last
        try:
            form = form_of(pipe, {})
            inputs = _scaled(pipe.scheduler, latents)
            clean = Prediction(pipe.scheduler).clean(inputs, output, timestep)
            pictures = form.picture(clean, form.size(named, named[sample]))
        except PartsongError:
            return ()
        return tuple(_png(picture, self._factor) for picture in self.show(pictures))


def shown_at(steps: int, num: int) -> list[int]:
    """Returns the steps after which a number of previews are shown: evenly, the first early, none at the end.

    >>> shown_at(28, 3)
    [6, 11, 17]
    """
    return [max(1, round(steps * (number + 1) / (num + 2))) for number in range(num)]


def _pictures(side: int) -> Tensor:
    """Draws pictures `[N, 3, side, side]` in [0, 1] of coloured blocks and slopes, always the same."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(_NUM, 3, 4, 4, generator=generator)
    flat = F.interpolate(blocks, (side, side), mode="nearest")
    slopes = F.interpolate(blocks.flip(0), (side, side), mode="bilinear", align_corners=True)
    return torch.cat([flat, slopes])


def _scaled(scheduler: Any, sample: Tensor) -> Tensor:
    """Returns a sample as the model is given it: some schedulers keep it larger by their noise."""
    level = float(getattr(scheduler, "init_noise_sigma", 1.0))
    if level <= 1.5 or not hasattr(scheduler, "sigmas"):
        return sample
    noise = float(scheduler.sigmas[max(scheduler.step_index - 1, 0)])
    return sample / (noise**2 + 1) ** 0.5


def _png(picture: Tensor, factor: int) -> bytes:
    pixels = Image.fromarray(rgb_bytes(picture.movedim(0, -1).cpu().numpy()))
    pixels = pixels.resize((pixels.width * factor, pixels.height * factor), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG")
    return buffer.getvalue()
