"""Describes the form of latents that pipelines pass to their models: pictures, or tokens of packed squares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partsong.errors import UnsupportedError

__all__ = ["FORMS", "PictureForm", "form_of"]

#: Sides of the squares of latents that one token holds.
_SQUARE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureForm:
    """Describes the form in which one pipeline passes latents to its model.

    Packed latents are tokens `[B, L, 4 C]`, row by row, whose channels are squares of 2 x 2 latents.

    Attributes:
        is_packed: latents are packed; otherwise they are pictures `[B, C, H, W]`.
        positions: the model's argument with a position for every token, `[..., L, n]`, row and column second and third.
        shapes: the model's argument that lists for every sample frames, rows and columns of tokens.
        resolution: the model's argument with a dictionary that holds the picture's ``resolution`` in pixels.
        text_first: in attention, the text's tokens come before the picture's.
        is_normalized: packed channels are normalized by the statistics of the autoencoder's ``bn``.
        refused: arguments of the pipeline's call that cannot be honoured -> why, and what to do.
        required: arguments that have to be given -> the value, and why.
    """

    is_packed: bool = False
    positions: str | None = None
    shapes: str | None = None
    resolution: str | None = None
    text_first: bool = False
    is_normalized: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def size(self, named: Mapping[str, Any], sample: Tensor) -> tuple[int, int]:
        """Returns height and width of the model's output in latents.

        Args:
            named: the model's arguments.
            sample: the one with the latents.
        """
        if self.positions is not None:
            places = named[self.positions].flatten(0, -2)
            return _SQUARE * (int(places[:, 1].max()) + 1), _SQUARE * (int(places[:, 2].max()) + 1)
        if self.shapes is not None:
            _, rows, columns = named[self.shapes][0][0]
            return _SQUARE * rows, _SQUARE * columns
        return sample.shape[-2], sample.shape[-1]

    def picture(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns latents as a picture `[B, C, H, W]`."""
        if not self.is_packed:
            return latents
        rows, columns = (side // _SQUARE for side in size)
        return F.pixel_shuffle(latents.transpose(1, 2).unflatten(2, (rows, columns)), _SQUARE)

    def latents(self, picture: Tensor) -> Tensor:
        """Returns a picture `[B, C, H, W]` as the model takes it."""
        return F.pixel_unshuffle(picture, _SQUARE).flatten(2).transpose(1, 2) if self.is_packed else picture

    def for_patch(self, named: Mapping[str, Any], size: tuple[int, int], patch: tuple[int, int]) -> dict[str, Any]:
        """Returns the arguments, besides the latents, with the token positions of a picture of a patch's size.

        Args:
            named: those for the whole picture.
            size: its height and width in latents.
            patch: those of a patch.
        """
        changed: dict[str, Any] = {}
        rows, columns = (side // _SQUARE for side in patch)
        if self.positions is not None:
            places = named[self.positions]
            grid = places.unflatten(-2, tuple(side // _SQUARE for side in size))
            changed[self.positions] = grid[..., :rows, :columns, :].flatten(-3, -2)
        if self.shapes is not None:
            changed[self.shapes] = [[(1, rows, columns)] for _ in named[self.shapes]]
        if self.resolution is not None and named[self.resolution]["resolution"] is not None:
            given = named[self.resolution]
            ratio = given["resolution"].new_tensor(patch) / given["resolution"].new_tensor(size)
            changed[self.resolution] = {**given, "resolution": given["resolution"] * ratio}
        return changed

    def enlarged(self, clean: Tensor, factor: int, autoencoder: Any) -> Tensor:
        """Enlarges an estimate of clean latents `[B, C, H, W]` smoothly.

        Args:
            clean: the estimate.
            factor: how many times.
            autoencoder: the pipeline's; it has the statistics that normalize packed channels.
        """
        if not self.is_normalized:
            return F.interpolate(clean, scale_factor=factor, mode="bilinear")
        mean, variance = (
            value.view(1, -1, 1, 1) for value in (autoencoder.bn.running_mean, autoencoder.bn.running_var)
        )
        deviation = torch.sqrt(variance + autoencoder.config.batch_norm_eps).to(clean)
        plain = F.pixel_shuffle(F.pixel_unshuffle(clean, _SQUARE) * deviation + mean.to(clean), _SQUARE)
        grown = F.pixel_unshuffle(F.interpolate(plain, scale_factor=factor, mode="bilinear"), _SQUARE)
        return F.pixel_shuffle((grown - mean.to(clean)) / deviation, _SQUARE)


_SKIPS = {"skip_guidance_layers": "it calls the model twice in a step; leave it out"}
_REFERENCE = {"image": "a reference picture has no place in the patches; leave it out"}
_BINS = {"use_resolution_binning": (False, "it makes another picture's size of the one asked for")}
_PLAIN = PictureForm(refused=_SKIPS)
_FLUX2 = PictureForm(is_packed=True, positions="img_ids", text_first=True, is_normalized=True, refused=_REFERENCE)
_PIXART = PictureForm(resolution="added_cond_kwargs", required=_BINS)

#: Known pipelines by the name of their class.
FORMS: Mapping[str, PictureForm] = {
    "StableDiffusionPipeline": _PLAIN,
    "StableDiffusionXLPipeline": _PLAIN,
    "StableDiffusion3Pipeline": _PLAIN,
    "FluxPipeline": PictureForm(is_packed=True, positions="img_ids", text_first=True),
    "Flux2Pipeline": _FLUX2,
    "Flux2KleinPipeline": _FLUX2,
    "QwenImagePipeline": PictureForm(is_packed=True, shapes="img_shapes", text_first=True),
    "PixArtAlphaPipeline": _PIXART,
    "PixArtSigmaPipeline": _PIXART,
}


def form_of(pipe: Any, arguments: Mapping[str, Any]) -> PictureForm:
    """Returns the form of a pipeline's latents.

    Raises:
        UnsupportedError: the pipeline is not known, or its call has arguments that cannot be honoured.
    """
    name = type(pipe).__name__
    if name not in FORMS:
        raise UnsupportedError(f"StructureGuidance on {name}: it is known for {', '.join(FORMS)} only")
    for argument, (value, why) in FORMS[name].required.items():
        if arguments.get(argument) != value:
            raise UnsupportedError(f"StructureGuidance on {name}: {why}; give {argument}={value}")
    return FORMS[name]
