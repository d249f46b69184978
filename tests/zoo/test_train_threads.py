"""The recipe of models that think in threads runs from nothing to a folder, resumes bit by bit, and reinforces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.reasoning.threads import FORMATS, TokenRun
from partsong_zoo.products import examples
from partsong_zoo.products.model import build_tokenizer
from partsong_zoo.products.rollouts import Rollout, rewards_of
from partsong_zoo.products.training import speech_of, text_of
from partsong_zoo.training.stage import TrainingStage
from partsong_zoo.training.thread_batch import pack_threads
from partsong_zoo.training.thread_training import supervised_loss
from tests.recipe_module import loaded


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_threads") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **changed: Any) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {"steps": 20, "batch": 8, "heads": 1, "depth": 1, "problems": 2, "save_minutes": 0.0, "max_tokens": 12}
    small = {"grpo_steps": 2, "questions": 1, "group": 2}
    return recipe.Config(out=str(out), **{**sizes, **small, **changed})


@pytest.fixture(scope="module", params=["threads", pytest.param("sequential", marks=pytest.mark.full)])
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    out = tmp_path_factory.mktemp("straight")
    recipe.run(tiny(recipe, out, mode=request.param, stages="data,sft,grpo,export,evaluate"))
    return out, request.param


def test_the_recipe_makes_a_stock_folder_and_scores(finished: tuple[Path, str]) -> None:
    out, mode = finished
    model: Any = AutoModelForCausalLM.from_pretrained(out / "export" / mode)
    assert type(model) is LlamaForCausalLM and {p.dtype for p in model.parameters()} == {torch.float32}
    assert AutoTokenizer.from_pretrained(out / "export" / mode)("12*3=?").input_ids[-1] != 1
    (row,) = json.loads((out / f"scores-{mode}.json").read_text())
    assert row["problems"] == 2 and 0 < row["tokens_critical"] <= row["tokens_total"]
    lines = [json.loads(line) for line in (out / f"data-{mode}.jsonl").read_text().splitlines()]
    forks = [any("threads" in part for part in line["parts"]) for line in lines]
    assert set(forks) == {mode == "threads"}
    steps = [json.loads(line) for line in (out / f"grpo-{mode}.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1]
    assert all(0 < line["tokens_critical"] <= line["tokens_total"] for line in steps)


def test_a_model_of_ones_own_is_reinforced_as_it_is(
    recipe: ModuleType, finished: tuple[Path, str], tmp_path: Path
) -> None:
    """Without a stage `sft`; at a rate of 0 it stays what it was."""
    out, mode = finished
    folder = out / "export" / mode
    config = tiny(recipe, tmp_path, mode=mode, model=str(folder), grpo_rate=0.0, stages="grpo,export")
    recipe.run(config)
    was: Any = AutoModelForCausalLM.from_pretrained(folder)
    became: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / mode)
    assert all(torch.equal(value, became.state_dict()[name]) for name, value in was.state_dict().items())
    assert len((tmp_path / f"grpo-{mode}.jsonl").read_text().splitlines()) == 2


def test_training_lowers_the_loss_on_problems_it_has_not_seen(recipe: ModuleType, finished: tuple[Path, str]) -> None:
    out, mode = finished
    model = recipe.Work(tiny(recipe, out, mode=mode)).new_model()
    form, speech = FORMATS["multiverse"] if mode == "threads" else None, speech_of(build_tokenizer())
    batch = pack_threads([text_of(problem, form, speech) for problem in examples(16, 5)])
    with torch.no_grad():
        before = float(supervised_loss(model, batch))
        model.load_state_dict(torch.load(out / f"sft-{mode}.pt", weights_only=True)["model"])
        assert float(supervised_loss(model, batch)) < 0.9 * before


@pytest.mark.full
def test_an_interrupted_run_ends_with_the_same_bits(
    recipe: ModuleType, finished: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, mode = finished
    config, save = tiny(recipe, tmp_path, mode=mode, stages="sft"), TrainingStage.save

    def dies(stage: TrainingStage) -> None:
        save(stage)
        if stage.step == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStage, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            recipe.run(config)
    recipe.run(config)
    straight, resumed = (torch.load(each / f"sft-{mode}.pt", weights_only=True) for each in (out, tmp_path))
    assert straight["step"] == resumed["step"] == 20
    for kind in ("model", "average"):
        assert all(torch.equal(straight[kind][name], resumed[kind][name]) for name in straight[kind])


def test_both_modes_show_the_same_problems_at_every_step(recipe: ModuleType, tmp_path: Path) -> None:
    works = [recipe.Work(tiny(recipe, tmp_path, mode=mode)) for mode in ("threads", "sequential")]
    for step in range(5):
        first, second = (work.problems(work.rng("sft", step), 8) for work in works)
        assert first == second
    sizes = [sum(p.numel() for p in work.new_model().parameters()) for work in works]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mode": "serial"}, "mode='serial'"),
        ({"format": "xml"}, "format='xml'"),
        ({"join": "values"}, "join='values'"),
        ({"stages": "sft,ppo"}, "no stage 'ppo'"),
        ({"stages": "grpo"}, "run the stage 'sft' first"),
        ({"stages": "export"}, "run the stage 'sft' first"),
    ],
)
def test_what_cannot_be_is_refused(recipe: ModuleType, tmp_path: Path, changed: dict[str, str], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        recipe.run(tiny(recipe, tmp_path, **changed))


def test_rewards_go_group_by_group() -> None:
    text = (TokenRun((1,)),)
    rollouts = [
        Rollout(text, right=True, forked=True, total=100, critical=50),
        Rollout(text, right=False, forked=True, total=100, critical=50),
        Rollout(text, right=True, forked=False, total=100, critical=100),
        Rollout(text, right=True, forked=True, total=100, critical=90),
    ]
    rewards, advantages = rewards_of(rollouts, 0, reward="accelerated", scale="none", group=2)
    assert rewards == pytest.approx([1.1, 0.0, 1.0, 1.05])
    assert advantages == pytest.approx([0.55, -0.55, -0.025, 0.025])
    assert rewards_of(rollouts, 9, reward="alternating", scale="none", group=4)[0] == [1.2, -1.0, 1.0, 1.2]
    with pytest.raises(ArgumentError, match="reward='speed'; use accelerated or alternating"):
        rewards_of(rollouts, 0, scale="none", reward="speed", group=2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="group=3, but there are 4 samples"):
        rewards_of(rollouts, 0, scale="none", reward="alternating", group=3)
