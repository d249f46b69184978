"""The recipe of prices: what it asks is true, all sides begin as the model that learned, and stages go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError
from partsong.reasoning.parscale.model import ParScale
from partsong_zoo.training.parscale_checkpoint import load_model
from tests.recipe_module import loaded

SMALL: dict[str, Any] = {
    "seeds": 1, "steps": 3, "learn_steps": 5, "batch": 8, "learn_batch": 8, "width": 8, "heads": 2, "inner": 8,
    "goods": 5, "shops": 6, "items": 16,
}  # fmt: skip
GOODS, SHOPS, ORDINALS = 10, 15, 21  # the first id of each


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_prices") as module:
        yield module


def test_answers_are_the_prices(recipe: ModuleType) -> None:
    config = recipe.Config(**SMALL)
    table = recipe.prices(config, 3)
    assert table.shape == (6, 5) and len(set(table.flatten().tolist())) > 5
    lengths = set()
    for step in range(8):
        lesson = recipe.look_ups(config, 3)(step)
        lengths.add(lesson.ids.shape[1])
        for which, *goods, shop, price in lesson.ids.tolist():
            assert price == table[shop - SHOPS, goods[which - ORDINALS] - GOODS]
        asked = recipe.questions(config, 3)(step)
        for *goods, shop, price in asked.ids.tolist():
            assert len(goods) == 4 and price == max(table[shop - SHOPS, each - GOODS] for each in goods)
        for each in (lesson, asked):
            assert each.learned[:, -1].all() and int(each.learned.sum()) == 8
    assert lengths == {4, 5, 6, 7}
    same, other = (recipe.questions(config, seed)(2).ids for seed in (3, 4))
    assert torch.equal(same, recipe.questions(config, 3)(2).ids) and not torch.equal(same, other)
    assert not torch.equal(same, recipe.questions(config, 3, held_out=True)(2).ids)


def test_all_stages_run_and_go_on(recipe: ModuleType, tmp_path: Path) -> None:
    config = recipe.Config(out=str(tmp_path), stages="learn,ask,export", **SMALL)
    with pytest.raises(ArgumentError, match="run the stage 'learn'"):
        recipe.load_learned(config, 0)
    recipe.run(config)
    first = json.loads((tmp_path / "scores.json").read_text())
    recipe.run(config)  # all is done already
    assert json.loads((tmp_path / "scores.json").read_text()) == first
    rows = {row["side"]: row for row in first["rows"]}
    assert tuple(rows) == recipe.SIDES
    size = rows["streams"]["parameters"]
    for name in ("recycled", "noise"):
        assert rows[name]["parameters"] == size and rows[name]["streams"] == 4
    assert size <= rows["prefix"]["parameters"] < size + 4 * 8
    assert size <= rows["wide"]["parameters"] == rows["longer"]["parameters"] < size + 6 * 8
    model, (weights,) = load_model(tmp_path / "export")
    assert recipe.score(config, model, weights, 0)["loss"] == pytest.approx(rows["streams"]["loss"], rel=1e-6)
    with pytest.raises(ArgumentError, match="at step 5 of 9"):
        recipe.load_learned(recipe.Config(out=str(tmp_path), **{**SMALL, "learn_steps": 9}), 0)


def test_sides_begin_as_the_model_that_learned(recipe: ModuleType, tmp_path: Path) -> None:
    """The wider one says the same, and every stream what it says behind its ordinal."""
    config = recipe.Config(out=str(tmp_path), stages="learn", **SMALL)
    recipe.run(config)
    with torch.no_grad():
        _compare(recipe, config)


def _compare(recipe: ModuleType, config: Any) -> None:
    ids = recipe.questions(config, 0)(0).ids
    base, (wide, none) = recipe.load_learned(config, 0), recipe.make_side(config, "wide", 0)
    assert none is None
    torch.testing.assert_close(wide(ids).logits, base(ids).logits, rtol=1e-5, atol=1e-5)
    learns = [layer.mlp.up_proj.weight[8:].abs().min() > 0 for layer in wide.model.layers]
    assert all(learns) and recipe.count(wide) > recipe.count(base)
    asked = torch.stack([base(torch.cat([torch.full((8, 1), ORDINALS + n), ids], 1)).logits[:, 1:] for n in range(4)])
    for name, wanted in (("frozen", asked[0]), ("streams", asked.mean(0))):
        model, weights = recipe.make_side(config, name, 0)
        with ParScale(model, weights):
            torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("wrong", "said"), [({"stages": "trian"}, "no 'trian'"), ({"sides": "two"}, "no 'two'")])
def test_mistaken_arguments_are_refused(recipe: ModuleType, tmp_path: Path, wrong: dict[str, str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        recipe.run(recipe.Config(out=str(tmp_path), **{**SMALL, **wrong}))
