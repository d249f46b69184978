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

#: Side, in latents, and number of the pictures to which the map is fitted first.
_SIDE, _NUM = 16, 8
#: Weight of one of them relative to a sampled picture.
_FIRST = 0.01


class LatentColours:
    """Maps the latents of an autoencoder to colours, with one matrix for all positions.

    The matrix is the least-squares one for pairs of latents and the colours of the square that they stand for. It
    is first fitted to encoded pictures of coloured blocks and gradients, then to each picture that the model makes,
    which soon outweigh the first ones: previews show what this model draws.

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
        width = latents.shape[1] + 1
        self._products = torch.zeros(width, width, dtype=torch.float64)
        self._targets = torch.zeros(width, 3, dtype=torch.float64)
        self._add(latents, pictures, weight=_FIRST)

    def learn(self, pipe: Any, named: dict[str, Any], sample: str, latents: Tensor, images: Any) -> None:
        """Fits the map to a finished picture.

        Args:
            pipe: the pipeline of the call.
            named: arguments of its last call of the denoiser.
            sample: name of the argument with the latents.
            latents: what the pipeline decoded.
            images: what it decoded them to, `[N, H, W, 3]` in [0, 1].
        """
        try:
            form = form_of(pipe, {})
            places = form.picture(latents, form.size(named, named[sample]))
        except PartsongError:
            return
        self._add(places, torch.as_tensor(images).movedim(-1, 1), weight=1.0)

    def _add(self, latents: Tensor, pictures: Tensor, weight: float) -> None:
        colours = (
            F.adaptive_avg_pool2d(pictures, (latents.shape[-2], latents.shape[-1]))
            .movedim(1, -1)
            .flatten(0, -2)
            .double()
            .cpu()
        )
        rows = _rows(latents).cpu()
        self._products += weight * rows.mT @ rows
        self._targets += weight * rows.mT @ colours
        # Until there are enough pictures, a little of the identity keeps the equations solvable.
        slight = 1e-6 * self._products.diagonal().mean() * torch.eye(len(self._products), dtype=torch.float64)
        self._map = torch.linalg.solve(self._products + slight, self._targets)

    def show(self, latents: Tensor) -> Tensor:
        """Returns the colours `[B, 3, h, w]` in [0, 1] of latents `[B, C, h, w]`."""
        number, _, height, width = latents.shape
        colours = (_rows(latents).cpu() @ self._map).unflatten(0, (number, height, width))
        return colours.movedim(-1, 1).clamp(0, 1).float()

    def preview(self, pipe: Any, named: dict[str, Any], sample: str, last: tuple[Any, Any, Any]) -> tuple[bytes, ...]:
        """Returns PNG files of the current state of a call's pictures; empty where it is unknown.

        Args:
            pipe: the pipeline of the call, whose scheduler has made a step.
            named: arguments of the next call of the denoiser.
            sample: name of the argument with the latents.
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


def _rows(latents: Tensor) -> Tensor:
    """Returns the latents of each position `[N, C + 1]`, with a one for the constant."""
    rows = latents.movedim(1, -1).flatten(0, -2).double()
    return torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)


def _pictures(side: int) -> Tensor:
    """Draws pictures `[N, 3, side, side]` in [0, 1] of coloured blocks and gradients, always the same."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(_NUM, 3, 4, 4, generator=generator)
    flat = F.interpolate(blocks, (side, side), mode="nearest")
    slopes = F.interpolate(blocks.flip(0), (side, side), mode="bilinear", align_corners=True)
    return torch.cat([flat, slopes])


def _scaled(scheduler: Any, sample: Tensor) -> Tensor:
    """Returns a sample scaled as the model gets it: some schedulers keep it scaled up by their noise level."""
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
