"""The recipe of few steps runs from nothing, continues where it stopped, and writes a stock pipeline."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from partsong.errors import ArgumentError
from partsong_zoo.shapes.grammar import describe, parse
from partsong_zoo.shapes.latent_reader import FACTS, LatentReader, asked_facts, fact_loss, scene_facts
from partsong_zoo.shapes.model import deepened, token_ids
from partsong_zoo.shapes.scenes import COLOURS, PLACES, SHAPES, SIZES, draw_things, generator
from partsong_zoo.training.common import World
from tests.recipe_module import loaded


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_shapes_few") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **more: Any) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {"pool_size": 12, "batch": 2, "levels": 6, "captions": 2, "warm_steps": 2, "save_minutes": 0.0}
    sizes |= {"copies": 1, "reader_batch": 4}
    steps = {"reader_steps": 2, "discrete_steps": 2, "continuous_steps": 2, "matching_steps": 2}
    return recipe.Config(out=str(out), device="cpu", **{**sizes, **steps, **more})


@pytest.fixture(scope="module")
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    recipe.run(tiny(recipe, out), World("cpu"))
    return out


@pytest.mark.slow
def test_every_stage_is_trained_and_moves_the_student(recipe: ModuleType, finished: Path) -> None:
    config = tiny(recipe, finished)
    students = [recipe.trained_model(World("cpu"), 1).transformer.state_dict()]
    students += [recipe.student_weights(config, stage) for stage in ("discrete", "continuous", "matching")]
    for before, after in itertools.pairwise(students):
        moved = max(float((before[name].float() - after[name]).abs().max()) for name in after)
        assert 0 < moved < 0.05
    saved = torch.load(finished / "matching.pt", weights_only=True)["model"]
    assert any(name.startswith("fake.") for name in saved), "the model of the student's samples is saved too"


def test_the_folder_is_a_stock_pipeline_of_few_steps(finished: Path) -> None:
    report = json.loads((finished / "facts.json").read_text())
    assert report["captions"] == 2 and all(0 <= report[f"{n} steps"]["facts_read"] <= 1 for n in (1, 2, 4))
    pipeline: Any = DiffusionPipeline.from_pretrained(finished / "export")
    pipeline.set_progress_bar_config(disable=True)
    levels = list[float]()
    asked = {"num_inference_steps": 2, "guidance_scale": 1.0, "max_sequence_length": 1}
    pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: levels.append(float(kwargs["timestep"][0]) / 1000), with_kwargs=True
    )
    image = pipeline("a red circle", output_type="np", **asked).images[0]
    assert levels == pytest.approx([1.0, 0.75], abs=2e-3), "no step is spent where nothing is left to do"
    assert image.shape == (64, 64, 3) and np.isfinite(image).all()


@pytest.mark.full
def test_a_stage_that_was_stopped_continues(
    recipe: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pool.npy", "discrete.pt"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    config, calls = tiny(recipe, tmp_path, stages="continuous"), list[int]()
    loss_of = recipe.Lessons.continuous

    def stopping(self: Any, step: int, *args: Any) -> Any:
        calls.append(step)
        if calls == [0, 1]:
            raise KeyboardInterrupt
        return loss_of(self, step, *args)

    monkeypatch.setattr(recipe.Lessons, "continuous", stopping)
    with pytest.raises(KeyboardInterrupt):
        recipe.run(config, World("cpu"))
    recipe.run(config, World("cpu"))
    assert calls == [0, 1, 1]
    whole = recipe.student_weights(tiny(recipe, finished), "continuous")
    for name, tensor in recipe.student_weights(config, "continuous").items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=0)


def test_unknown_stages_and_knobs_out_of_bounds_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no stage 'distil'"):
        recipe.run(tiny(recipe, tmp_path, stages="pool,distil"), World("cpu"))
    for knob, value in (("consistency", 1.5), ("copies", 6), ("reading", -1.0)):
        with pytest.raises(ArgumentError, match=knob):
            recipe.run(tiny(recipe, tmp_path, **{knob: value}), World("cpu"))
    with pytest.raises(ArgumentError, match="copies 6 of 6 blocks; use 0 to 5"):
        recipe.trained_model(World("cpu"), 6)


@pytest.mark.full
def test_a_student_that_was_shipped_is_trained_on(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    for name in ("pool.npy", "reader.pt"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    knobs = {"start": str(finished / "export"), "stages": "matching", "matching_rate": 0.0, "matching_steps": 1}
    recipe.run(tiny(recipe, tmp_path, **knobs), World("cpu"))
    begun = recipe.student_weights(tiny(recipe, tmp_path), "matching")
    for name, tensor in recipe.student_weights(tiny(recipe, finished), "matching").items():
        torch.testing.assert_close(begun[name], tensor.half().float(), rtol=0, atol=0)


def test_a_folder_that_no_student_can_begin_with_is_refused(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="it has no model_index.json; name a saved pipeline's folder"):
        recipe.run(tiny(recipe, tmp_path, start=str(tmp_path)), World("cpu"))
    with pytest.raises(ArgumentError, match="cannot begin with .*: its transformer_blocks"):
        recipe.run(tiny(recipe, tmp_path, start=str(finished / "export"), copies=2), World("cpu"))
    assert not (tmp_path / "pool.npy").exists(), "before any work"


@pytest.mark.parametrize("knobs", [{"seed": 1}, {"pool_size": 11}], ids=str)
def test_a_pool_of_other_scenes_is_refused(
    recipe: ModuleType, finished: Path, tmp_path: Path, knobs: dict[str, int]
) -> None:
    (tmp_path / "pool.npy").write_bytes((finished / "pool.npy").read_bytes())
    with pytest.raises(ArgumentError, match=r"pool\.npy holds 12 scenes and shows others than the 1[12] of this seed"):
        recipe.run(tiny(recipe, tmp_path, stages="discrete", **knobs), World("cpu"))
    (tmp_path / "pool.npy").unlink()
    with pytest.raises(ArgumentError, match=r"no .*pool\.npy; run the stage 'pool' first"):
        recipe.run(tiny(recipe, tmp_path, stages="discrete"), World("cpu"))


def test_minutes_that_are_used_up_end_a_stage(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "pool.npy").write_bytes((finished / "pool.npy").read_bytes())
    knobs = {"stages": "discrete", "discrete_steps": 10**6, "minutes": 1e-6}
    recipe.run(tiny(recipe, tmp_path, **knobs), World("cpu"))
    assert torch.load(tmp_path / "discrete.pt", weights_only=True)["step"] == 1


def test_matching_without_a_reader_is_refused(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "pool.npy").write_bytes((finished / "pool.npy").read_bytes())
    with pytest.raises(ArgumentError, match=r"no .*/reader\.pt; run the stage 'reader' first, or use --reading 0"):
        recipe.run(tiny(recipe, tmp_path, stages="matching"), World("cpu"))
    assert not (tmp_path / "matching.pt").exists()


def test_a_step_that_matches_holds_to_consistency_as_often_as_asked(recipe: ModuleType, finished: Path) -> None:
    """Of the same draws, a step with consistency has the loss of one without and the consistency's beside it."""
    totals, parts = list[Tensor](), list[Tensor]()
    for share in (0.0, 1.0):
        lessons = recipe.Lessons(tiny(recipe, finished, consistency=share), World("cpu"))
        continuous = lessons.continuous

        def watched(*args: Any, loss_of: Any = continuous, **knobs: Any) -> Tensor:
            parts.append(loss_of(*args, **knobs))
            return parts[-1]

        lessons.continuous = watched
        totals.append(lessons.matching(0, np.random.default_rng(3)).detach())
    assert len(parts) == 1
    torch.testing.assert_close(totals[1], totals[0] + parts[0].detach())


def test_a_reader_of_latents_knows_what_captions_decide() -> None:
    """What a caption asks for holds in the scene that it describes, and nothing else is decided."""
    for index in range(200):
        rng = generator(5, index)
        things = draw_things(rng)
        if (caption := describe(things, rng)) is None:
            continue
        wanted, decided = asked_facts([caption])
        holds = scene_facts([things])
        assert torch.equal(holds[decided == 1], wanted[decided == 1]), caption
        scene = parse(caption)
        sizes, places = (sum(getattr(item, name) is not None for item in scene.items) for name in ("size", "place"))
        num = 2 * len(COLOURS) + len(SHAPES) * len(scene.items) + len(SIZES) * sizes + len(PLACES) * places
        assert int(decided.sum()) == num + len(scene.relations)
    logits = torch.where(wanted == 1, 20.0, -20.0)
    assert float(fact_loss(logits, wanted, decided)) < 1e-6
    worse = logits.clone()
    worse[0, int(decided[0].nonzero()[0])] *= -1
    assert float(fact_loss(worse, wanted, decided)) == pytest.approx(20, abs=1e-3)


def test_a_deeper_transformer_begins_as_what_it_was_and_all_of_it_can_learn(recipe: ModuleType) -> None:
    model, draw = recipe.shipped_model(World("cpu")), torch.Generator().manual_seed(0)
    latents, ids = torch.randn(2, 4, 16, 16, generator=draw), token_ids(["a red circle", "a blue cross"])
    call = (latents, torch.tensor([0.3, 0.9]), ids, torch.ones(2))
    before = model(*call)
    model.transformer = deepened(model.transformer, 2).requires_grad_(True)
    assert len(model.transformer.transformer_blocks) == 8
    torch.testing.assert_close(model(*call), before, rtol=0, atol=0)
    optimizer = torch.optim.SGD(model.transformer.parameters(), 1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        (model(*call) - latents).square().mean().backward()
        optimizer.step()
    copies = [model.transformer.transformer_blocks[index] for index in (4, 6)]
    assert all(p.grad is not None and bool(p.grad.any()) for copy in copies for p in copy.parameters())


def test_a_sample_that_lacks_what_its_caption_asks_for_costs_more(recipe: ModuleType, finished: Path) -> None:
    lessons = recipe.Lessons(tiny(recipe, finished), World("cpu"))
    example = lessons.draw(np.random.default_rng(1))
    lessons.reader = lambda latents, time: latents.flatten(1)[:, :FACTS]
    wanted = asked_facts(example.texts)[0]
    good = torch.zeros(len(wanted), 4 * 16 * 16)
    good[:, :FACTS] = torch.where(wanted == 1, 30.0, -30.0)
    good = good.view(-1, 4, 16, 16)
    assert float(lessons.missing(example, good)) < 1e-3 < float(lessons.missing(example, -good))


def test_a_reader_of_latents_learns_to_tell_scenes_apart(recipe: ModuleType, finished: Path) -> None:
    config = tiny(recipe, finished)
    latents, facts = torch.from_numpy(np.load(finished / "pool.npy")).float(), scene_facts(recipe.pool_scenes(config))
    torch.manual_seed(0)
    reader, time = LatentReader(width=32), torch.zeros(len(latents))
    optimizer = torch.optim.Adam(reader.parameters(), 2e-3)
    for _ in range(300):
        optimizer.zero_grad()
        told = reader(latents, time)
        if torch.equal((told > 0).float(), facts):
            return
        fact_loss(told, facts, torch.ones_like(facts)).mean().backward()
        optimizer.step()
    pytest.fail("300 steps were not enough")
