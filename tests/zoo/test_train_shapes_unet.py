"""The UNet recipe runs from nothing to a stock Stable Diffusion folder, and continues an interrupted run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from torch import Tensor, nn

from partsong_zoo import shapes
from partsong_zoo.shapes.drawing import paint
from partsong_zoo.shapes.model import build_vae, token_ids
from partsong_zoo.shapes.scenes import COLOURS, GROUND, draw_things, generator
from partsong_zoo.shapes_unet.model import (
    Painter,
    build_scheduler,
    build_tokenizer,
    draw_timesteps,
    fold_statistics,
)
from partsong_zoo.shapes_unet.muon import KernelMuon, orthogonalised
from partsong_zoo.shapes_unet.positions import KINDS, draw_layout
from partsong_zoo.training.common import World, mixed_precision, multiplies_bfloat16
from partsong_zoo.training.stage import TrainingStage, adam, read_average
from tests.recipe_module import assert_refused_before_any_work, loaded

CAPTION = "a red circle left of a blue square"


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_shapes_unet") as module:
        yield module


def tiny(recipe: ModuleType, out: Path) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {"autoencoder_batch": 2, "autoencoder_channels": 8, "pool_size": 16, "text_batch": 4, "unet_batch": 4}
    lengths = {"autoencoder_steps": 3, "text_steps": 3, "unet_steps": 4, "save_minutes": 0.0}
    measured = {"captions": 2, "steps": 2}
    return recipe.Config(out=str(out), device="cpu", width=32, depth=1, **sizes, **lengths, **measured)


@pytest.fixture(scope="module")
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    recipe.run(tiny(recipe, out), World("cpu"))
    return out


class Scaling(nn.Module):
    """Arithmetic whose bits do not depend on the machine: one product per element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def train_scaling(path: Path, stop_at: int | None = None) -> dict[str, Any]:
    """Trains for eight steps, or until interrupted in step `stop_at`; the checkpoint."""
    model = Scaling()
    options: dict[str, Any] = {"key": (1, 2), "steps": 8, "minutes": 9e9, "save_minutes": 0.0}
    stage = TrainingStage(World("cpu"), path, model, [adam(list(model.parameters()), 0.1)], **options)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        if stage.step == stop_at:
            raise KeyboardInterrupt
        x = torch.from_numpy(rng.standard_normal(64)).float() + torch.randn(64)
        return (model(x) - 3 * x).square().sum(), ""

    with pytest.raises(KeyboardInterrupt) if stop_at is not None else contextlib.nullcontext():
        stage.run(loss_of)
    return torch.load(path, weights_only=True)


def test_averages_are_read_whole_or_of_a_part(tmp_path: Path) -> None:
    weights = {"0.weight": torch.ones(2), "10.weight": torch.zeros(2), "0.bias": torch.full((1,), 3.0)}
    torch.save({"average": weights}, tmp_path / "stage.pt")
    assert read_average(tmp_path / "stage.pt").keys() == weights.keys()
    assert {name: float(each.sum()) for name, each in read_average(tmp_path / "stage.pt", "0").items()} == {
        "weight": 2.0,
        "bias": 3.0,
    }


@pytest.mark.parametrize(
    ("device", "has", "mixes"), [("cpu", True, True), ("cpu", False, False), ("cuda", False, True)]
)
def test_products_are_mixed_where_the_device_has_them(
    monkeypatch: pytest.MonkeyPatch, device: str, has: bool, mixes: bool
) -> None:
    capabilities = {"avx2": True, "avx512_bf16": False, "amx_bf16": has}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert multiplies_bfloat16(torch.device(device)) is mixes
    if device == "cpu":
        with mixed_precision(World("cpu")):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == (torch.bfloat16 if mixes else torch.float32)


@pytest.mark.parametrize("has", [True, False])
def test_torch_without_a_list_of_instructions_tells_of_one(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    assert multiplies_bfloat16(torch.device("cpu")) is has


def test_a_stage_continues_bit_for_bit(tmp_path: Path) -> None:
    straight = train_scaling(tmp_path / "straight.pt")
    assert train_scaling(tmp_path / "stopped.pt", stop_at=3)["step"] == 3
    continued = train_scaling(tmp_path / "stopped.pt")
    assert continued["step"] == straight["step"] == 8
    names = ("model", "average", "optimizers")
    torch.testing.assert_close([continued[n] for n in names], [straight[n] for n in names], rtol=0, atol=0)


@pytest.mark.full
def test_an_interrupted_recipe_makes_the_steps_it_would_have_made(
    recipe: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []

    def draw(num: int, rng: np.random.Generator, lean: float) -> Tensor:
        if interrupted and len(drawn) == 2:
            raise KeyboardInterrupt
        drawn.append(draw_timesteps(num, rng, lean))
        return drawn[-1]

    monkeypatch.setattr(recipe, "draw_timesteps", draw)
    for out in ("straight", "stopped"):
        shutil.copytree(finished, tmp_path / out)
        (tmp_path / out / "unet.pt").unlink()
    interrupted = False
    recipe.train_unet(tiny(recipe, tmp_path / "straight"), World("cpu"))
    straight, interrupted = torch.stack(drawn), True
    drawn.clear()
    with pytest.raises(KeyboardInterrupt):
        recipe.train_unet(tiny(recipe, tmp_path / "stopped"), World("cpu"))
    interrupted = False
    recipe.train_unet(tiny(recipe, tmp_path / "stopped"), World("cpu"))
    assert torch.equal(torch.stack(drawn), straight)


def test_a_resumed_recipe_holds_what_was_saved(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    """Bits of what is loaded; those of further steps differ from run to run, as fast kernels' sums do."""
    shutil.copytree(finished, tmp_path / "again")
    stage = recipe.unet_stage(tiny(recipe, tmp_path / "again"), World("cpu"))
    saved = torch.load(finished / "unet.pt", weights_only=True)
    assert stage.step == saved["step"] == 4
    held = [stage.module.state_dict(), stage.average.module.state_dict()]
    held += [optimizer.state_dict()["state"] for optimizer, _ in stage.optimizers]
    wanted = [saved["model"], saved["average"], *(state["state"] for state in saved["optimizers"])]
    assert all(wanted)
    torch.testing.assert_close(held, wanted, rtol=0, atol=0)


def test_the_folder_is_stock_and_samples(finished: Path) -> None:
    report = json.loads((finished / "facts.json").read_text())
    assert report["captions"] == 2
    assert 0.0 <= report["facts_read"] <= 1.0
    assert (finished / "samples.png").is_file()
    index = json.loads((finished / "export" / "model_index.json").read_text())
    assert {value[0] for value in index.values() if isinstance(value, list)} == {None, "diffusers", "transformers"}
    assert {p.name for p in (finished / "export" / "tokenizer").iterdir()} >= {"vocab.json", "merges.txt"}
    pipeline = DiffusionPipeline.from_pretrained(finished / "export")
    assert type(pipeline) is StableDiffusionPipeline
    kinds = {p.dtype for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder) for p in part.parameters()}
    assert kinds == {torch.float32}
    pipeline.set_progress_bar_config(disable=True)
    for size in ({}, {"height": 96, "width": 40}):
        image = pipeline(CAPTION, num_inference_steps=2, output_type="np", **size).images[0]
        assert image.shape == (size.get("height", 64), size.get("width", 64), 3)
        assert np.isfinite(image).all()


def test_tokenizer_has_one_token_per_word() -> None:
    tokenizer = build_tokenizer()
    captions = ["", *shapes.captions(100, seed=4)]
    assert torch.equal(tokenizer(captions, padding="max_length", return_tensors="pt").input_ids, token_ids(captions))
    assert tokenizer("A red zebra").input_ids[1:3] == tokenizer("a red").input_ids[1:3]
    assert tokenizer.unk_token_id in tokenizer("a red zebra").input_ids


def test_folded_statistics_leave_the_picture_alone() -> None:
    torch.manual_seed(0)
    vae = build_vae(8, scaling_factor=1.0).double()
    images = torch.rand(4, 3, 64, 64, dtype=torch.float64)
    before = vae.encode(images).latent_dist
    decoded = vae.decode(before.mean).sample
    fold_statistics(vae, before.mean.mean(dim=(0, 2, 3)), before.mean.std(dim=(0, 2, 3)))
    after = vae.encode(images).latent_dist
    torch.testing.assert_close(after.mean.mean(dim=(0, 2, 3)), torch.zeros(4).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(after.mean.std(dim=(0, 2, 3)), torch.ones(4).double())
    torch.testing.assert_close(vae.decode(after.mean).sample, decoded)
    ratio = before.mean.std(dim=(0, 2, 3))[None, :, None, None]
    torch.testing.assert_close(after.std * ratio, before.std)


def test_the_schedule_ends_in_pure_noise() -> None:
    scheduler = build_scheduler()
    assert float(scheduler.alphas_cumprod[-1]) == 0.0
    scheduler.set_timesteps(28)
    assert int(scheduler.timesteps[0]) == 999


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")
@pytest.mark.parametrize("adjusted", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_kernels_are_trained_as_matrices(monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, adjusted: str) -> None:
    monkeypatch.setattr("partsong_zoo.shapes_unet.muon.multiplies_bfloat16", lambda device: has_bfloat16)
    torch.manual_seed(0)
    kernels = [nn.Parameter(torch.randn(*shape)) for shape in ((8, 4, 3, 3), (30, 2, 3, 3))]
    matrices = [nn.Parameter(kernel.detach().flatten(1).clone()) for kernel in kernels]
    ours, stock = (
        muon(each, lr=0.1, adjust_lr_fn=adjusted)
        for muon, each in ((KernelMuon, kernels), (torch.optim.Muon, matrices))
    )
    for _ in range(3):
        for kernel, matrix in zip(kernels, matrices, strict=True):
            kernel.grad = torch.randn_like(kernel)
            matrix.grad = kernel.grad.flatten(1)
        ours.step()
        stock.step()
    # The stock step rounds to eight bits.
    near = {"rtol": 0, "atol": 0} if has_bfloat16 else {"rtol": 0, "atol": 0.02}
    for kernel, matrix in zip(kernels, matrices, strict=True):
        torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach(), **near)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (7, 7)])
def test_singular_values_move_as_the_polynomial_moves_them(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(*shape, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4 * values - 4.7 * values**3 + 2.0 * values**5
    moved = orthogonalised(matrix, (3.4, -4.7, 2.0), 5, 1e-7)
    torch.testing.assert_close(moved, left @ values.diag() @ right)


def test_kernels_stay_where_they_are() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        KernelMuon([nn.Parameter(torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))])


def test_a_pipeline_is_trained_on(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(
        tiny(recipe, tmp_path), start=str(finished / "export"), stages="autoencoder,pool,text", unet_steps=1
    )
    recipe.run(config, World("cpu"))
    assert not (tmp_path / "text.pt").exists() and (tmp_path / "pool-0-of-1.npy").exists()
    pipeline: Any = DiffusionPipeline.from_pretrained(finished / "export")
    began = recipe.unet_stage(config, World("cpu")).module.unet.state_dict()
    torch.testing.assert_close(began, pipeline.unet.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "nothing"}, "cannot begin with 'nothing': it has no model_index.json"),
        ({"width": 64}, r"cannot begin with .*: its conv_in.weight is \[32, 4, 3, 3\], and this recipe's is \[64, "),
        ({"depth": 2}, "transformer_blocks.1.* is missing, and this recipe's is .*; give the recipe the sizes"),
    ],
)
def test_a_wrong_pipeline_to_begin_with_is_refused_before_any_work(
    recipe: ModuleType, finished: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(tiny(recipe, tmp_path / "new"), **{"start": str(finished / "export")} | changes)
    assert_refused_before_any_work(recipe, config, message)


def losses_of_readouts(num_steps: int, which: int, layouts: Tensor, latents: Tensor | None = None) -> list[float]:
    """Trains a small UNet on one of the read-outs' two losses alone, with text of noise; latents are noise if None."""
    torch.manual_seed(0)
    model = Painter(width=32, depth=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = list[float]()
    for _ in range(num_steps):
        seen = torch.randn(4, 4, 16, 16) if latents is None else latents
        model.unet(seen, 500, encoder_hidden_states=torch.randn(4, 20, 192))
        loss = model.positions.losses(layouts)[which]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.full
def test_a_unet_learns_to_tell_where_it_is() -> None:
    """At first read-outs guess at chance; a few steps on them and on the UNet, of noise alone, tell most places."""
    losses = losses_of_readouts(40, 0, torch.full((4, KINDS, 8, 8), 1 / KINDS))
    assert losses[0] == pytest.approx(math.log(8), abs=0.3)
    assert losses[-1] < 0.6 * losses[0]


def test_a_layout_is_what_a_picture_shows() -> None:
    """The shares of colours at 8 x 8 places, against the mean of the painted pixels over every place's 8 x 8 pixels."""
    palette = np.array([GROUND, *COLOURS.values()], np.float64)
    for index in range(20):
        things = draw_things(generator(8, index))
        layout = draw_layout(things)
        np.testing.assert_allclose(layout.sum(axis=0), 1, atol=1e-6)
        mean = paint(things).reshape(8, 8, 8, 8, 3).mean(axis=(1, 3))
        # Coverage of a place is told from the distance to its middle, which is rough for corners.
        assert np.abs(np.einsum("kyx,kc->yxc", layout, palette) - mean).mean() < 0.02 * 255


@pytest.mark.full
def test_a_unet_learns_to_tell_what_stands_where() -> None:
    """Told by its latents which of four pictures it sees, it soon does better than who knows their mean layout."""
    layouts = torch.from_numpy(np.stack([draw_layout(draw_things(generator(9, index))) for index in range(4)]))
    mean = layouts.mean(dim=0)
    entropy = -torch.xlogy(mean, mean).sum(dim=0).mean()
    losses = losses_of_readouts(60, 1, layouts, torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(1)))
    assert losses[-1] < float(entropy) < losses[0]


def test_a_caption_is_worded_anew_until_it_says_where(recipe: ModuleType) -> None:
    assert recipe.says_where("a red circle left of a blue square") and recipe.says_where("a red circle at the top")
    assert not recipe.says_where("a red circle and a blue square") and not recipe.says_where("")
    scenes = [draw_things(generator(3, index)) for index in range(200)]
    shares = [
        np.mean([recipe.says_where(text) for text in recipe.training_captions(scenes, generator(4), draws)])
        for draws in (1, 3)
    ]
    assert shares[0] < shares[1] - 0.1
