"""Opens the networks that score pictures, from the files that a user gives for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from PIL import Image
from torch import Tensor

from partsong.accelerator import accelerator
from partsong.errors import ArgumentError
from partsong.evals.pictures.aesthetic import Aesthetic
from partsong.evals.pictures.clip import Clip, clip_folder
from partsong.evals.pictures.given_files import read_pictures
from partsong.evals.pictures.lpips import Lpips
from partsong.parallel.ranks.mesh import DEVICE

__all__ = ["WANTED", "Scorers", "ScoringFiles"]

#: The option that a metric wants.
WANTED = {
    "lpips": "--lpips FILE, torchvision's weights of AlexNet",
    "clip_score": "--clip FOLDER, a CLIP model",
    "identity_clip": "--clip FOLDER, a CLIP model",
    "fid_clip": "--clip FOLDER, a CLIP model",
    "aesthetic": "--clip FOLDER and --aesthetic FILE, a head on its features",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorers:
    """Holds the networks that score pictures; None for each that was not given.

    Attributes:
        lpips: measures perceptual distance.
        clip: finds features.
        aesthetic: scores features.
        reference: features of the reference pictures, `[N, D]`.
    """

    lpips: Lpips | None = None
    clip: Clip | None = None
    aesthetic: Aesthetic | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringFiles:
    """Says where the networks are that score pictures, and the pictures to compare with.

    Attributes:
        lpips: file with torchvision's weights of AlexNet.
        clip: folder or hub id of a CLIP model.
        aesthetic: file with a head on its features.
        reference: folder of pictures.
    """

    lpips: str | None = None
    clip: str | None = None
    aesthetic: str | None = None
    reference: str | None = None

    def check(self) -> None:
        """Checks before any work that all of it can be read; of CLIP's weights nothing is read.

        Raises:
            ArgumentError: a file is missing or does not fit, or torchmetrics is not installed.
        """
        if find_spec("torchmetrics") is None:
            raise ArgumentError("torchmetrics is not installed, which computes SSIM: pip install 'partsong[eval]'")
        for name in ("aesthetic", "reference"):
            if getattr(self, name) is not None and self.clip is None:
                raise ArgumentError(f"--{name} needs the features of a CLIP model; add --clip FOLDER")
        if self.lpips is not None:
            Lpips.read(self.lpips)
        width = clip_folder(self.clip)[1] if self.clip is not None else 0
        if self.aesthetic is not None:
            Aesthetic(self.aesthetic, width)
        if self.reference is not None:
            read_pictures(self.reference)

    def open(self) -> Scorers:
        """Reads the networks, and finds the features of the reference pictures.

        Raises:
            ArgumentError: one cannot be read.
        """
        device = torch.device(os.environ.get(DEVICE) or accelerator())
        lpips = None if self.lpips is None else Lpips.read(self.lpips, device=device)
        if self.clip is None:
            return Scorers(lpips=lpips)
        folder, width = clip_folder(self.clip)
        clip = Clip(folder, device=device)
        files = [] if self.reference is None else read_pictures(self.reference)
        return Scorers(
            lpips=lpips,
            clip=clip,
            aesthetic=None if self.aesthetic is None else Aesthetic(self.aesthetic, width),
            reference=clip.pictures(Image.open(file).convert("RGB") for file in files) if files else None,
        )
