"""Checks pictures that begin with a picture and a mask, against the pipeline itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from partsong.seeds import generators
from partsong.serving.ranks.served_model import read_mask
from tests.integrations.comfy_stub import pack_beside
from tests.serving.running import RunningServer, pixels

PROMPT = "a red circle"


def _file(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _half(mode: str) -> Image.Image:
    """A mask that asks for the right half: white there, or transparent there."""
    white = np.zeros((64, 64), dtype=np.uint8)
    white[:, 32:] = 255
    if mode == "L":
        return Image.fromarray(white)
    picture = Image.new("RGBA", (64, 64), "green")
    picture.putalpha(Image.fromarray(255 - white))
    return picture


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_both_kinds_of_masks_mean_the_same(tmp_path: Path, mode: str) -> None:
    _half(mode).save(tmp_path / "mask.png")
    assert np.array_equal(np.asarray(read_mask(tmp_path / "mask.png")), np.asarray(_half("L")))


@pytest.mark.slow
def test_an_edit_is_what_the_pipeline_makes_of_it(
    inpainting: Any, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = inpainting[0]
    start = Image.fromarray(np.full((64, 64, 3), (230, 220, 200), dtype=np.uint8))
    with torch.no_grad():
        arguments = {"image": start, "mask_image": _half("L"), "num_inference_steps": 5, "strength": 0.9}
        expected = pipe([PROMPT], generator=generators(7, 1), output_type="np", **arguments).images[0]
    client = server.client()
    body: dict[str, Any] = {"seed": 7, "num_inference_steps": 5, "strength": 0.9}
    picture = ("a.png", _file(start))
    asked: dict[str, Any] = {"model": "edits", "prompt": PROMPT, "image": picture, "extra_body": body}
    reply = client.images.edit(**asked, mask=("mask.png", _file(_half("RGBA"))))
    assert reply.data is not None
    drawn = pixels(str(reply.data[0].b64_json))
    assert np.abs(drawn - np.round(255 * expected)).max() <= 1
    with pytest.raises(openai.BadRequestError, match="no picture that can be read"):
        client.images.edit(**{**asked, "image": ("a.png", b"not a picture")})
    with pytest.raises(openai.BadRequestError, match="begins with one picture, and 2 were sent"):
        client.images.edit(**{**asked, "image": [picture, picture]})
    before = set((server.folder / "files").iterdir())
    with pytest.raises(openai.BadRequestError, match="magic"):
        client.images.edit(**{**asked, "extra_body": {"strategy": "magic"}})
    assert set((server.folder / "files").iterdir()) == before  # what was sent is not left behind
    with pytest.raises(openai.BadRequestError, match="save_path is not known"):
        client.images.edit(**{**asked, "extra_body": {"save_path": "/etc/x"}})
    with pack_beside(monkeypatch, server.url) as pack:
        asked = {"prompt": PROMPT, "seed": 7, "steps": 5, "strength": 0.9, "model": "edits"}
        image = torch.from_numpy(np.asarray(start)[None] / np.float32(255))
        mask = torch.from_numpy(np.asarray(_half("L"))[None] / np.float32(255))
        again, _ = pack.nodes.PartsongEdit.execute(image=image, mask=mask, **asked).values
        assert np.abs(np.round(255 * again[0].numpy()) - drawn).max() <= 1
