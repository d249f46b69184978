"""The recipe end to end on a model of a minute's breath: sides of equal size, held-out problems, stages that resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError
from partsong_zoo.training.parscale_checkpoint import load_model
from tests.recipe_module import loaded

SMALL: dict[str, Any] = {"seeds": 1, "steps": 3, "batch": 8, "width": 8, "depth": 1, "prefix": 2, "items": 16}


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_parscale") as module:
        yield module


def test_all_stages_run_and_go_on(recipe: ModuleType, tmp_path: Path) -> None:
    config = recipe.Config(out=str(tmp_path), stages="train,measure,recycle,export", **SMALL)
    recipe.run(config)
    first = json.loads((tmp_path / "scores.json").read_text())
    assert [row["side"] for row in first["rows"]] == ["one", "wide", "streams", "frozen", "prefix", "recycled"]
    recipe.run(config)  # all is done already
    assert json.loads((tmp_path / "scores.json").read_text()) == first
    one, wide, streams, frozen, prefix, recycled = first["rows"]
    assert one["parameters"] < streams["parameters"] <= wide["parameters"] < streams["parameters"] + 3 * 8
    assert recycled["parameters"] == streams["parameters"] and recycled["streams"] == 4
    assert streams["parameters"] <= prefix["parameters"] < streams["parameters"] + 2 * 8 and prefix["streams"] == 1
    same = ("parameters", "loss", "tokens_right")
    assert [frozen[name] for name in same] == [one[name] for name in same]
    model, (weights,) = load_model(tmp_path / "export")
    assert recipe.score(config, model, weights)["loss"] == pytest.approx(streams["loss"], rel=1e-6)
    elsewhere = recipe.Config(out=str(tmp_path / "x"), stages="recycle", backbone=str(tmp_path / "one-0"), **SMALL)
    recipe.run(elsewhere)
    assert json.loads((tmp_path / "x" / "scores.json").read_text())["rows"] == first["rows"][3:]
    with pytest.raises(ArgumentError, match="--backbone"):
        recipe.run(recipe.Config(out=str(tmp_path / "y"), stages="recycle", **SMALL))
    with pytest.raises(ArgumentError, match="at step 3 of 9"):
        recipe.run(recipe.Config(out=str(tmp_path), stages="measure", **{**SMALL, "steps": 9}))


def test_products_that_measure_are_never_shown(recipe: ModuleType) -> None:
    config = recipe.Config(**{**SMALL, "batch": 256})
    shown, kept = (
        {tuple(row) for step in range(20) for row in recipe.lessons(config, seed, held_out=out)(step).ids.tolist()}
        for seed, out in ((0, False), (0, True))
    )
    assert len(shown) > 3000 and len(kept) > 1000 and not shown & kept
    for row in [*shown, *kept][::50]:
        left, right = row[0] * 10 + row[1], row[3] * 10 + row[4]
        assert (row[2], row[5]) == (10, 11)
        assert int("".join(map(str, row[6:]))) == left * right
    again, other = (recipe.lessons(config, seed)(3).ids for seed in (0, 1))
    assert torch.equal(again, recipe.lessons(config, 0)(3).ids) and not torch.equal(again, other)


def test_files_that_measure_are_never_shown(recipe: ModuleType, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.py").write_text(f"# {chr(65 + number % 26) * 30} {number}\n")
    shown, kept = recipe._corpus(str(tmp_path))
    assert len(shown) + len(kept) == sum(p.stat().st_size for p in tmp_path.iterdir()) + 38
    config = recipe.Config(**{**SMALL, "task": "code", "text": str(tmp_path), "length": 12})
    lesson = recipe.lessons(config, 0)(0)
    text = bytes(shown.astype("uint8")).decode()
    assert all(bytes(row).decode() in text for row in lesson.ids.tolist())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="0 Python files"):
        recipe._corpus(str(tmp_path / "empty"))


def test_mistaken_arguments_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    for wrong, said in (
        ({"stages": "trian"}, "no 'trian'"),
        ({"sides": "two"}, "no 'two'"),
        ({"task": "x"}, "task='x'; use product or code"),
    ):
        with pytest.raises(ArgumentError, match=said):
            recipe.run(recipe.Config(out=str(tmp_path), **{**SMALL, **wrong}))
