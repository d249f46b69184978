"""The recipe of certain decoders trains every method, continues where it stopped, and exports stock folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from partsong import zoo
from partsong.errors import ArgumentError
from partsong_zoo.lists.trajectories import ODDS
from partsong_zoo.shapes.scenes import generator
from partsong_zoo.training.common import World
from tests import covering
from tests.recipe_module import loaded

METHODS = ("plain", "dparallel", "d3llm", "cllm", "t3d", "oput", "rediff-noise", "rediff", "lightning")


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("distil_lists") as module:
        yield module


@pytest.fixture(scope="module")
def texts(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the teacher's texts are recorded."""
    out = tmp_path_factory.mktemp("texts")
    recipe.run(tiny(recipe, out, stages="trajectories"), World("cpu"))
    return out / "texts.safetensors"


def tiny(recipe: ModuleType, out: Path, **changed: Any) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {"texts": 40, "steps": 4, "batch": 8, "group": 4, "prompts": 2, "save_minutes": 0.0}
    return recipe.Config(out=str(out), **{**sizes, **changed})


def put(texts: Path, out: Path) -> Path:
    (out / texts.name).write_bytes(texts.read_bytes())
    return out


def test_the_methods_are_those_of_the_recipe(recipe: ModuleType) -> None:
    assert recipe.METHODS == METHODS


@pytest.mark.parametrize("method", METHODS if covering.FULL else METHODS[:2])
def test_every_method_moves_the_student_a_little(recipe: ModuleType, texts: Path, tmp_path: Path, method: str) -> None:
    # Of few prompts' answers all may be as fast as each other, which teaches nothing.
    batch = 32 if method == "lightning" else 8
    config = tiny(recipe, put(texts, tmp_path), method=method, stages="train", seed=2, batch=batch, steps=2)
    recipe.run(config, World("cpu"))
    student, teacher = recipe.load_student(config, f"{method}-2"), zoo.load("lists-mdlm").model.state_dict()
    moved = max(float((student[name] - teacher[name]).abs().max()) for name in student)
    assert 0 < moved < 0.02
    assert all(tensor.isfinite().all() for tensor in student.values())


@pytest.mark.full
def test_the_reference_is_renewed_at_each_third(
    recipe: ModuleType, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(recipe, put(texts, tmp_path), method="t3d", stages="train", steps=6)
    teacher, loss_of, apart = zoo.load("lists-mdlm").model.state_dict(), recipe.Lessons.t3d, list[tuple[bool, bool]]()

    def watched(self: Any, *args: Any) -> Any:
        loss = loss_of(self, *args)
        weights = self.reference.state_dict()
        apart.append(
            tuple(
                any(not torch.equal(weights[name], other[name]) for name in weights)
                for other in (teacher, self.student.state_dict())
            )
        )
        return loss

    monkeypatch.setattr(recipe.Lessons, "t3d", watched)
    recipe.run(config, World("cpu"))
    from_teacher, from_student = zip(*apart, strict=True)
    assert from_teacher == (False, False, True, True, True, True)
    assert from_student == (False, True, False, True, False, True)


@pytest.mark.full
@pytest.mark.parametrize("method", ["t3d", "d3llm", "rediff", "lightning"])
def test_a_student_that_was_stopped_continues_bit_by_bit(
    recipe: ModuleType, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The curriculum, the second stage and the sampled answers depend on the step alone."""
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    asked: dict[str, Any] = {"method": method, "stages": "train"}
    asked["batch"] = 24 if method == "lightning" else 8
    straight = tiny(recipe, put(texts, tmp_path / "straight"), **asked)
    recipe.run(straight, World("cpu"))
    stopped, steps = tiny(recipe, put(texts, tmp_path / "stopped"), **asked), list[int]()
    loss_of = recipe.Lessons.loss

    def stopping(self: Any, step: int, *args: Any) -> Any:
        steps.append(step)
        if steps == [0, 1, 2]:
            raise KeyboardInterrupt
        return loss_of(self, step, *args)

    monkeypatch.setattr(recipe.Lessons, "loss", stopping)
    with pytest.raises(KeyboardInterrupt):
        recipe.run(stopped, World("cpu"))
    recipe.run(stopped, World("cpu"))
    assert steps == [0, 1, 2, 2, 3]
    whole = recipe.load_student(straight, straight.name)
    for name, tensor in recipe.load_student(stopped, stopped.name).items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.full
def test_the_folder_is_stock_and_its_scores_stand_beside_the_teachers(
    recipe: ModuleType, texts: Path, tmp_path: Path
) -> None:
    recipe.run(tiny(recipe, put(texts, tmp_path), method="oput"), World("cpu"))
    folder = tmp_path / "export" / "oput-0"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM and model.config.partsong_adapter == "mdlm"
    report = json.loads((tmp_path / "scores-oput-0.json").read_text())
    for name in ("lists-mdlm", "oput-0"):
        assert list(report[name]) == list(ODDS)
        assert all(0 <= row["accuracy"] <= 1 <= row["tokens_per_forward"] + 1 for row in report[name].values())


@pytest.mark.full
def test_a_student_can_begin_as_another(recipe: ModuleType, texts: Path, tmp_path: Path) -> None:
    out = put(texts, tmp_path)
    recipe.run(tiny(recipe, out, method="plain", stages="train"), World("cpu"))
    config = tiny(recipe, out, method="lightning", start="plain-0", stages="train", reinforced_rate=1e-12)
    recipe.run(config, World("cpu"))
    plain, later = (recipe.load_student(config, name) for name in ("plain-0", "lightning-0"))
    for name in plain:
        torch.testing.assert_close(later[name], plain[name], rtol=0, atol=1e-6)


@pytest.mark.full
def test_the_entropy_term_makes_students_more_certain(recipe: ModuleType, texts: Path, tmp_path: Path) -> None:
    """Two students that differ by the weight alone see the same batches and masks."""
    entropies = []
    for weight in (0.0, 2.0):
        config = tiny(recipe, put(texts, tmp_path), method="dparallel", batch=16, entropy=weight)
        student = recipe.teacher_model(config).requires_grad_(True)
        lessons = recipe.Lessons(config, World("cpu"), {"student": student})
        optimizer = torch.optim.Adam(student.parameters(), lr=3e-4)
        for step in range(10):
            optimizer.zero_grad()
            lessons.loss(step, generator(7, step % 2)).backward()
            optimizer.step()
        batch, _ = lessons.draw(generator(7, 0))
        with torch.no_grad():
            logits = lessons.masked(batch, batch.canvas)[batch.canvas]
        entropies.append(float(torch.distributions.Categorical(logits=logits).entropy().mean()))
    assert entropies[1] < 0.97 * entropies[0]


def test_what_is_missing_is_named(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="run the stage 'trajectories' first"):
        recipe.run(tiny(recipe, tmp_path, stages="train"), World("cpu"))
    with pytest.raises(ArgumentError, match="run the stage 'train' first"):
        recipe.run(tiny(recipe, tmp_path, stages="export"), World("cpu"))
    with pytest.raises(ArgumentError, match="no stage 'distil'"):
        recipe.run(tiny(recipe, tmp_path, stages="distil"), World("cpu"))
    with pytest.raises(ArgumentError, match="method='magic'"):
        recipe.run(tiny(recipe, tmp_path, method="magic"), World("cpu"))
