"""A folder of Flux with its text encoders: a size that it rounds is said, and the picture has the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from partsong import zoo
from partsong.cli import main
from tests.pipelines.cases import CASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe, tokenizer = CASES["FluxPipeline"].make(), zoo.load("shapes-unet").tokenizer
    config = pipe.transformer.config
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.pooled_projection_dim,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    words = T5Config(
        vocab_size=len(tokenizer), d_model=config.joint_attention_dim, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    encoders = {"text_encoder": CLIPTextModel(clip), "text_encoder_2": T5EncoderModel(words)}
    whole = type(pipe)(**{**pipe.components, **encoders, "tokenizer": tokenizer, "tokenizer_2": tokenizer})
    path = tmp_path_factory.mktemp("flux")
    whole.save_pretrained(path)
    return path


@pytest.mark.full
@pytest.mark.parametrize("arguments", [[], ["--nproc", "2", "--strategy", "ulysses"]], ids=["one rank", "two ranks"])
def test_a_size_that_is_rounded_is_said(folder: Path, tmp_path: Path, arguments: list[str]) -> None:
    out, told = tmp_path / "a.png", tmp_path / "a.json"
    asked = ["--height", "100", "--width", "130", "--steps", "2", "--out", str(out), "--json", str(told)]
    with pytest.raises(SystemExit) as ended:
        main(["image", "a cat", "--model", str(folder), *asked, *arguments])
    assert ended.value.code == 0
    result = json.loads(told.read_text())
    assert (result["width"], result["height"]) == (128, 96)
    assert result["size_note"] == "130 x 100 pixels were asked for, and the model makes 128 x 96"
    assert Image.open(out).size == (128, 96)
