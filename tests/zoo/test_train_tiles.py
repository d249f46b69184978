"""The recipe of picture tokens runs from nothing, continues where it stopped, and writes a folder that draws."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from partsong.errors import ArgumentError
from partsong_zoo.tiles.loading import load_tiles
from partsong_zoo.training.common import World
from tests.recipe_module import loaded


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_tiles") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **more: Any) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {"tokenizer_batch": 2, "scenes": 2, "pool_size": 6, "heads": 1, "depth": 1, "batch": 2, "captions": 2}
    steps = {"tokenizer_steps": 2, "steps": 3, "save_minutes": 0.0}
    return recipe.Config(out=str(out), device="cpu", **{**sizes, **steps, **more})


@pytest.fixture(scope="module")
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    recipe.run(tiny(recipe, out), World("cpu"))
    return out


def test_the_folder_draws(finished: Path) -> None:
    report = json.loads((finished / "facts.json").read_text())
    assert all(0 <= report[f"{steps} steps"]["facts_read"] <= 1 for steps in (64, 12, 8))
    assert {"facts_read", "psnr", "codes_used"} <= json.loads((finished / "tokenizer.json").read_text()).keys()
    model = load_tiles(finished / "export")
    saved = torch.load(finished / "transformer.pt", weights_only=True)["average"]
    norm = "model.norm.weight"
    torch.testing.assert_close(model.model.state_dict()[norm], saved[norm], rtol=1e-3, atol=1e-3)
    codes = torch.from_numpy(np.load(finished / "pool.npy").astype(np.int64))
    assert codes.shape == (6, 64) and model.draw(codes[:2]).shape == (2, 64, 64, 3)


@pytest.mark.full
def test_a_stage_that_was_stopped_continues(
    recipe: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pool.npy").write_bytes((finished / "pool.npy").read_bytes())
    config, calls = tiny(recipe, tmp_path, stages="transformer"), list[int]()
    loss = recipe.group_loss

    def stopping(*args: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return loss(*args)

    monkeypatch.setattr(recipe, "group_loss", stopping)
    with pytest.raises(KeyboardInterrupt):
        recipe.run(config, World("cpu"))
    recipe.run(config, World("cpu"))
    assert len(calls) == 4, "one step is made again"
    whole, again = (torch.load(path / "transformer.pt", weights_only=True)["model"] for path in (finished, tmp_path))
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=0)


def test_unknown_stages_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no stage 'distil'"):
        recipe.run(tiny(recipe, tmp_path, stages="pool,distil"), World("cpu"))
