"""Features of a tiny CLIP model against transformers' own similarity, and models that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPModel

from partsong import ArgumentError
from partsong.evals.pictures.clip import Clip, clip_folder, clip_scores
from tests.evals.pictures.tiny_clip import LENGTH, SIDE, save_clip
from tests.pipelines.unet_parts import clip_tokenizer

#: Mean and deviation of the colours that CLIP was trained on.
MEAN, DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


def test_scores_are_the_cosines_of_the_model_itself(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, SIDE, SIDE, 3), dtype=np.uint8)
    texts = [f"{'ab' * (1 + n % 3)} c" for n in range(20)]
    prepared = torch.from_numpy((pixels / 255 - MEAN) / DEVIATION).float().movedim(-1, 1)
    model = CLIPModel.from_pretrained(folder).eval()
    tokens = clip_tokenizer(LENGTH)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        similar = model(pixel_values=prepared, **tokens).logits_per_image / model.logit_scale.exp()
    clip = Clip(folder)
    features = clip.pictures(pixels)  # more than one batch
    assert features.shape == (20, 8)
    expected = (100 * similar.diagonal()).clamp(min=0)
    assert 0 < (expected > 0).sum() < 20
    assert clip_scores(features, clip.texts(texts)) == pytest.approx(expected.tolist(), abs=1e-3)
    alone = torch.cat([clip.texts([text]) for text in texts])
    torch.testing.assert_close(alone, clip.texts(texts), atol=1e-5, rtol=1e-5)  # padding changes nothing


def test_long_texts_are_cut(folder: Path) -> None:
    clip = Clip(folder)
    torch.testing.assert_close(clip.texts(["abc" * 40]), clip.texts(["abc" * 41]))


def test_other_models_are_refused(folder: Path, tmp_path: Path) -> None:
    assert clip_folder(str(folder)) == (folder, 8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ArgumentError, match="is no CLIP model: its config.json says 'llama'"):
        clip_folder(str(tmp_path))
    with pytest.raises(ArgumentError, match="no model 'missing'"):
        clip_folder("missing")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ArgumentError, match="cannot be loaded"):
        Clip(tmp_path)
