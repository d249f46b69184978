"""The recipe for heads: it samples, trains, continues, exports and measures; and the data it trains on."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError
from partsong.reasoning.local.mask_head import load_head
from partsong_zoo.heads import prompts_of
from partsong_zoo.lists.tasks import check
from partsong_zoo.sums.problems import held_out, parse
from partsong_zoo.training.common import World
from tests.recipe_module import loaded

SMALL: dict[str, Any] = {"texts": 24, "max_tokens": 24, "masks": 3, "rank": 2, "batch": 4, "anchors": 3, "problems": 3}


def run(recipe: ModuleType, folder: Path, **more: Any) -> None:
    recipe.run(recipe.Config(out=str(folder), **{**SMALL, **more}), World("cpu"))


@pytest.mark.full
def test_a_stopped_training_continues_with_the_steps_it_would_have_made(tmp_path: Path) -> None:
    with loaded("train_heads") as recipe:
        run(recipe, tmp_path / "whole", stages="samples,train", steps=4)
        for steps in (2, 4):
            (tmp_path / "halves").mkdir(exist_ok=True)
            (tmp_path / "halves" / "samples.safetensors").write_bytes(
                (tmp_path / "whole" / "samples.safetensors").read_bytes()
            )
            config = recipe.Config(out=str(tmp_path / "halves"), stages="train", **{**SMALL, "steps": 4})
            stage = recipe.train(config, World("cpu")) if steps == 4 else _stopped(recipe, config)
            assert stage.step == steps
        whole, halves = (
            torch.load(tmp_path / name / "head.pt", weights_only=True)["average"] for name in ("whole", "halves")
        )
        assert all(torch.equal(whole[name], halves[name]) for name in whole)
        # The model itself is neither trained nor saved.
        assert not any(name.startswith("model") for name in whole)


def _stopped(recipe: ModuleType, config: Any) -> Any:
    """Trains two of four steps."""

    class Stopped(Exception):
        pass

    original = recipe.head_losses
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise Stopped
        return original(*arguments)

    stages: list[Any] = []
    stage_class = recipe.TrainingStage

    def kept(*arguments: Any, **more: Any) -> Any:
        stages.append(stage_class(*arguments, **more))
        return stages[-1]

    recipe.head_losses, recipe.TrainingStage = counted, kept
    try:
        with pytest.raises(Stopped):
            recipe.train(config, World("cpu"))
    finally:
        recipe.head_losses, recipe.TrainingStage = original, stage_class
    stages[0].save()
    return stages[0]


def test_a_head_is_exported_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loaded("train_heads") as recipe:
        run(recipe, tmp_path, steps=2)
    head = load_head(tmp_path / "export" / "lists-ar" / "head")
    assert (head.settings.num_masks, head.settings.rank, head.settings.hidden_size) == (3, 2, 128)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert json.loads(capsys.readouterr().out) == scores
    for temperature in ("temperature 0", "temperature 1"):
        assert scores[temperature]["tokens_per_forward"] >= 1 and scores[temperature]["guessed"] > 0


def test_prompts_come_from_the_task_or_from_a_file(tmp_path: Path) -> None:
    assert prompts_of("lists-ar", 5, seed=3) == prompts_of("lists-ar", 8, seed=3)[:5]
    assert not {*prompts_of("lists-ar", 20, seed=3)} & {*prompts_of("lists-ar", 20, seed=3, fresh=True)}
    assert check(prompts_of("lists-ar", 1)[0], "nothing") is False
    assert all(held_out(parse(prompt)) for prompt in prompts_of("sums", 20, fresh=True))
    with pytest.raises(ArgumentError, match="no prompts are known for 'products'"):
        prompts_of("products", 1)
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"sort : dog ant {number} =\n" for number in range(20)))
    with loaded("train_heads") as recipe:
        config = recipe.Config(prompts=str(file))
        assert recipe.own_prompts(config, 3, fresh=True) == [f"sort : dog ant {n} =" for n in (0, 10, 0)]
        assert len({*recipe.own_prompts(config, 50, fresh=False)}) == 18
        with pytest.raises(ArgumentError, match="no file"):
            recipe.own_prompts(recipe.Config(prompts="not-there"), 1, fresh=True)
        with pytest.raises(ArgumentError, match="no stage 'tain'"):
            run(recipe, tmp_path, stages="tain")
        with pytest.raises(ArgumentError, match="run the stage 'samples' first"):
            run(recipe, tmp_path / "new", stages="train")
