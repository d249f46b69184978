"""The recipe of experts runs from nothing, continues where it stopped, and its parts are what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from partsong import zoo
from partsong.errors import ArgumentError
from partsong_zoo.shapes_experts.clusters import find_clusters
from partsong_zoo.shapes_experts.loading import put_experts
from partsong_zoo.shapes_experts.low_rank import LowRankChanges
from partsong_zoo.training.common import World
from tests.recipe_module import loaded


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_shapes_experts") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **more: Any) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {"pool_size": 24, "batch": 2, "rank": 2, "router_batch": 2, "router_heads": 1, "experts": 2}
    sizes |= {"captions": 2, "scenes": 3, "denoising_steps": 2}
    return recipe.Config(out=str(out), device="cpu", steps=4, router_steps=2, save_minutes=0.0, **sizes, **more)


@pytest.fixture(scope="module")
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    recipe.run(tiny(recipe, out), World("cpu"))
    return out


def test_every_part_is_trained(recipe: ModuleType, finished: Path) -> None:
    steps = {path.stem: torch.load(path, weights_only=True)["step"] for path in finished.glob("*.pt")}
    assert steps == {"expert-0": 2, "expert-1": 2, "monolith": 4, "router": 2}
    ranks = {
        name: len(torch.load(finished / f"{name}.pt", weights_only=True)["model"][DOWN]) for name in list(steps)[:3]
    }
    assert sorted(ranks.values()) == [2, 2, 4], "the monolith learns as many numbers as all experts"


def test_the_folder_is_a_mixture_that_draws(finished: Path) -> None:
    report = json.loads((finished / "facts.json").read_text())
    assert 0 <= report["experts"]["facts_read"] <= 1 and report["captions"] == 2
    assert len(report["router is right, with captions"]) == 8
    pipeline = zoo.load("shapes", dtype=torch.bfloat16)
    put_experts(pipeline, zoo.MODELS["shapes"].folder, finished / "export")
    pipeline.set_progress_bar_config(disable=True)
    mixture = pipeline.transformer
    assert (mixture.num_experts, mixture.top_k, mixture.dtype, len(mixture.loaded)) == (2, 1, torch.bfloat16, 0)
    image = pipeline("a red circle", num_inference_steps=2, max_sequence_length=1, output_type="np").images[0]
    assert image.shape == (64, 64, 3) and np.isfinite(image).all()
    assert {each.dtype for each in mixture.loaded.values()} == {torch.bfloat16}


DOWN = "down.transformer_blocks/0/attn/to_q"


@pytest.mark.full
def test_a_stage_that_was_stopped_continues(
    recipe: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pool.npy", "clusters.npz"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    drawn, draw = [], recipe.Examples.draw

    def stopping(self: Any, rows: Any, *args: Any) -> Any:
        if len(drawn) == 1:
            drawn.append(None)
            raise KeyboardInterrupt
        drawn.append(rows.tolist())
        return draw(self, rows, *args)

    monkeypatch.setattr(recipe.Examples, "draw", stopping)
    config = tiny(recipe, tmp_path, stages="experts")
    with pytest.raises(KeyboardInterrupt):
        recipe.run(config, World("cpu"))
    recipe.run(config, World("cpu"))
    straight: list[Any] = []
    monkeypatch.setattr(
        recipe.Examples, "draw", lambda self, rows, *args: straight.append(rows.tolist()) or draw(self, rows, *args)
    )
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    recipe.run(config, World("cpu"))
    assert [rows for rows in drawn if rows is not None] == straight


def test_clusters_are_those_of_the_data() -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0], [5, 0], [0, 5]])
    truth = rng.choice(3, size=90, p=(0.5, 0.3, 0.2))
    latents = centres[truth][:, :, None, None] + 0.1 * rng.standard_normal((90, 2, 4, 4))
    clusters = find_clusters(latents, 3, seed=1)
    labels = clusters.labels(latents)
    assert len({*zip(labels, truth, strict=True)}) == 3
    assert list(np.bincount(labels)) == sorted(np.bincount(truth), reverse=True)
    with pytest.raises(ArgumentError, match="2 pictures make no 3 clusters"):
        find_clusters(latents[:2], 3, seed=1)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2))
        self.proj_out = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.transformer_blocks(x))


def test_merged_changes_are_attached_changes() -> None:
    torch.manual_seed(0)
    model, x = Blocks().double(), torch.randn(4, 3).double()
    changes = LowRankChanges.of(model, rank=2).double()
    plain = model(x)
    with changes.attached(model):
        assert torch.equal(model(x), plain), "changes begin at zero"
        for up in changes.up.values():
            nn.init.normal_(up)
        attached = model(x)
    assert torch.equal(model(x), plain)
    LowRankChanges.read(changes.state_dict()).double().merge(model)
    assert not torch.allclose(model(x), plain)
    torch.testing.assert_close(model(x), attached, rtol=0, atol=1e-6)
    with pytest.raises(ArgumentError, match=r"no layer transformer_blocks\.0 of size \[5, 3\]"):
        changes.merge(nn.Module())
