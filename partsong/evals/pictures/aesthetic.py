"""Predicts how much people like a picture, from its CLIP features."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError
from partsong.evals.pictures.given_files import fitting, read_weights

__all__ = ["Aesthetic"]


class Aesthetic:
    """Scores pictures with a head like that of LAION's aesthetic predictors.

    The head is one linear layer, or several without anything between them: ``layers.0.weight``, ``layers.2.weight`` ...
    in the order of their numbers, or just ``weight`` and ``bias``.

    Args:
        path: file with the head; see `read_weights`.
        width: length of the features.

    Raises:
        ArgumentError: the file holds something else, or a head for features of another length.
    """

    def __init__(self, path: str | Path, width: int) -> None:
        weights = read_weights(path)
        plain = {"layers.0." + name if name in ("weight", "bias") else name: value for name, value in weights.items()}
        numbers = [name.split(".")[1] for name in plain if name.startswith("layers.") and name.endswith(".weight")]
        if not numbers or not all(number.isdigit() for number in numbers):
            raise ArgumentError(f"--aesthetic {path} holds no layers.N.weight; found {', '.join(list(weights)[:4])}")
        self._layers: list[tuple[Tensor, Tensor]] = []
        for number in sorted(numbers, key=int):
            shape = plain[f"layers.{number}.weight"].shape
            shapes = {"weight": torch.Size((*shape[:1], width)), "bias": shape[:1]}
            given = fitting(path, plain, {f"layers.{number}.{part}": size for part, size in shapes.items()})
            self._layers.append((given[f"layers.{number}.weight"], given[f"layers.{number}.bias"]))
            width = shape[0]
        if width != 1:
            raise ArgumentError(f"--aesthetic {path} ends in {width} numbers for a picture; a score is one number")

    def __call__(self, features: Tensor) -> list[float]:
        """Returns a score for each row of features `[N, D]`, which are scaled to length 1 first."""
        features = nn.functional.normalize(features, dim=-1)
        for weight, bias in self._layers:
            features = nn.functional.linear(features, weight, bias)
        return features[:, 0].tolist()
