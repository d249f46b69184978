"""Scores pictures by the features that a CLIP model finds in them and in their prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError
from partsong.model_folders import model_folder, read_settings
from partsong.outputs import rgb_bytes

__all__ = ["Clip", "clip_folder", "clip_scores", "frechet_distance", "identity"]

#: Pictures that go through the model together.
_BATCH = 16


def clip_folder(name: str) -> tuple[Path, int]:
    """Returns the folder of a CLIP model and the length of its features; of the weights nothing is read.

    Raises:
        ArgumentError: there is no such model, or it is another kind of model.
    """
    folder = model_folder(name)
    settings = read_settings(folder)
    if settings.get("model_type") != "clip":
        raise ArgumentError(f"--clip {name} is no CLIP model: its config.json says {settings.get('model_type')!r}")
    return folder, int(settings.get("projection_dim", 512))


class Clip:
    """Finds the features of pictures and of texts with a CLIP model of transformers.

    Source: Radford et al., arXiv 2103.00020.

    Args:
        folder: of the model, with its tokenizer and ``preprocessor_config.json``.
        device: where to compute.

    Raises:
        ArgumentError: transformers cannot read the folder.
    """

    def __init__(self, folder: str | Path, *, device: str | torch.device = "cpu") -> None:
        from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

        options: dict[str, Any] = {"local_files_only": True}
        try:
            self._model: Any = CLIPModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **options)
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            self._prepare = CLIPImageProcessor.from_pretrained(folder, **options)
        except Exception as error:
            raise ArgumentError(f"--clip {folder} cannot be loaded: {type(error).__name__}: {error}") from error
        self._model.to(device).eval().requires_grad_(False)
        self._device = device

    @torch.inference_mode()
    def pictures(self, pictures: Iterable[Any]) -> Tensor:
        """Returns the features of pictures, `[N, D]`. Pictures are rounded to 8 bits first."""
        features, rest = [], iter(pictures)
        while batch := list(itertools.islice(rest, _BATCH)):
            pixels = self._prepare([rgb_bytes(picture) for picture in batch], return_tensors="pt")["pixel_values"]
            features.append(self._model.get_image_features(pixel_values=pixels.to(self._device)).pooler_output)
        return torch.cat(features).cpu()

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Returns the features of texts, `[N, D]`. What is longer than the model reads is cut off."""
        length = self._model.config.text_config.max_position_embeddings
        given = self._tokenizer(list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt")
        ids, mask = (given[name].to(self._device) for name in ("input_ids", "attention_mask"))
        return self._model.get_text_features(input_ids=ids, attention_mask=mask).pooler_output.cpu()


def clip_scores(pictures: Tensor, texts: Tensor) -> list[float]:
    """Returns 100 times the cosine of each picture's features with those of its text, and 0 where that is negative.

    Source: CLIPScore, Hessel et al., arXiv 2104.08718, with the factor 100 of torchmetrics.
    """
    return (100.0 * nn.functional.cosine_similarity(pictures, texts)).clamp(min=0.0).tolist()


def identity(frames: Tensor) -> float | None:
    """Returns the mean cosine of the features of all later frames with those of the first; None for one frame.

    It is "subject consistency" of VBench (arXiv 2311.17982) with CLIP, which is there computed with DINO.
    """
    return float(nn.functional.cosine_similarity(frames[1:], frames[:1]).mean()) if len(frames) > 1 else None


def frechet_distance(features: Tensor, reference: Tensor) -> float | None:
    """Returns the Fréchet distance of two sets of features: FID with the features of CLIP instead of Inception's.

    Few pictures give large distances, so compare only numbers of equally many pictures.

    Source: Heusel et al., arXiv 1706.08500; with CLIP, Kynkäänniemi et al., arXiv 2203.06026.

    Returns:
        None where one of the sets has fewer than two pictures.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    if min(len(features), len(reference)) < 2:
        return None
    given = nn.Identity()
    given.num_features = features.shape[1]  # type: ignore[assignment]
    metric = FrechetInceptionDistance(feature=given).set_dtype(torch.float64)
    metric.update(reference.double(), real=True)
    metric.update(features.double(), real=False)
    return max(0.0, float(metric.compute()))  # rounding may leave a little less than 0
