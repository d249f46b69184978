"""Picture tokens: a lattice of codes, a folder that loads stock, and pictures from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import VQModel
from torch.nn.functional import pixel_unshuffle
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from partsong.cli import main
from partsong.errors import ArgumentError
from partsong.samplers.any_order import LPD
from partsong_zoo.tiles.loading import load_tiles, save_tiles
from partsong_zoo.tiles.model import build_model
from partsong_zoo.tiles.scoring import score_tiles
from partsong_zoo.tiles.tokenizer import NUM_CODES, build_tokenizer, decode, encode, lattice, rounded, tokenizer_loss

CAPTION = "a red circle left of a blue square"


@pytest.fixture(scope="module")
def pictures() -> Any:
    torch.manual_seed(0)
    model = build_tokenizer(widths=(8, 16)).eval()
    model.quant_conv.weight.data.mul_(8)  # so that many codes are used
    return model


@pytest.fixture(scope="module")
def folder(pictures: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiles(build_model(1, 1), pictures, path, guidance=2.0)
    pictures.float()
    return path


def test_codes_are_points_of_a_lattice() -> None:
    points = lattice()
    assert points.shape == (NUM_CODES, 4)
    assert len(set(map(tuple, points.tolist()))) == NUM_CODES
    assert set(points.flatten().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}


def test_rounding_is_the_nearest_code_of_the_stock_model(pictures: Any) -> None:
    """What training rounds to, the codes that are counted, and the stock model's own quantizer: all the same."""
    images = torch.rand(6, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        latents = pictures.encode(pixel_unshuffle(images, 4)).latents
        _, _, (_, _, nearest) = pictures.quantize(latents)
    codes = encode(pictures, images)
    assert torch.equal(codes.flatten(), nearest)
    assert len(set(codes.flatten().tolist())) > 10
    points = lattice()[codes].view(6, 8, 8, 4).permute(0, 3, 1, 2)
    assert (rounded(latents) - points).abs().max() <= 1e-6
    with torch.no_grad():
        stock = pictures.decode(latents).sample
    assert (pixel_unshuffle(decode(pictures, codes), 4) - stock).abs().max() <= 1e-5


def test_the_loss_trains_both_sides_but_not_the_codes() -> None:
    torch.manual_seed(0)
    model = build_tokenizer(widths=(8, 16))
    loss, mse = tokenizer_loss(model, torch.rand(2, 3, 64, 64) * 2 - 1)
    loss.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and float(p.grad.abs().max()) > 0}
    assert {"encoder.conv_in.weight", "decoder.conv_out.weight"} <= moved
    assert not any(name.startswith("quantize") for name in moved)
    assert 0 < mse < float(loss.detach())


def test_the_folder_loads_stock(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM and model.dtype == torch.float32
    assert type(VQModel.from_pretrained(folder / "pictures")) is VQModel
    assert "_name_or_path" not in (folder / "pictures" / "config.json").read_text()


def test_pictures_are_read_as_pictures(folder: Path) -> None:
    loaded = load_tiles(folder)
    result = score_tiles(loaded, LPD(steps=4), 3, seed=1, batch=2)
    assert result.images.shape == (3, 64, 64, 3)
    assert result.images.min() >= 0 and result.images.max() <= 1
    assert len(result.facts) == 3
    assert loaded.captioned([CAPTION]).guidance == 2.0
    with pytest.raises(ArgumentError, match="the grammar is"):
        loaded.captioned(["a lighthouse"])


def command(*args: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_image_on_the_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, result, ledger = tmp_path / "x.png", tmp_path / "r.json", tmp_path / "l.jsonl"
    options = ["--model", folder, "--out", out, "--json", result, "--ledger", ledger, "--num-images", 2]
    assert command("image", CAPTION, *options, "--rule", "lpd:steps=12", "--compare") == 0
    values = json.loads(result.read_text())
    assert (values["rule"], values["class"], values["forwards"], values["forwards_serial"]) == (
        "lpd:steps=12",
        "approximate",
        12,
        64,
    )
    assert {"psnr_to_serial", "max_abs_diff", "facts_read", "bytes_sent", "seconds_serial", "speedup"} <= values.keys()
    assert [Path(path).is_file() for path in values["images"]] == [True, True]
    assert json.loads(ledger.read_text())["forwards"] == 12
    assert "lpd:steps=12 with 12 forwards" in capsys.readouterr().out
    for rule in ("assd:drafts=8", "keyed-jacobi:window=16"):
        assert command("image", CAPTION, *options, "--rule", rule, "--compare", "--guidance", 1) == 0
        values = json.loads(result.read_text())
        assert (values["class"], values["max_abs_diff"]) == ("exact", 0.0)
        assert values["tokens_rejected"] <= values["tokens_drafted"]
        assert np.isinf(values["psnr_to_serial"]) or values["psnr_to_serial"] == 999


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rule", "sooner"], "lpd, assd, keyed-jacobi"),
        (["--rule", "lpd:steps=65"], "65 steps for 64 tokens"),
        (["--steps", 4], "use --rule lpd:steps=N"),
        (["--strategy", "ulysses"], "use --rule"),
        (["--height", 128], "draws 64 x 64"),
        (["--nproc", 2], "one process"),
    ],
)
def test_refused(options: list[Any], words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("image", CAPTION, "--model", folder, *options) == 2
    assert words in capsys.readouterr().err


def test_other_models_have_no_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("image", CAPTION, "--model", "shapes", "--rule", "lpd") == 2
    assert "--rule is for models of picture tokens" in capsys.readouterr().err
