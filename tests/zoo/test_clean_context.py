"""Blocks see in training what they will see, and `motion-clean` what it computes in the slots of a cascade."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor
from torch import Tensor

from partsong import CascadePipeline, parallelize
from partsong.samplers import stream
from partsong.samplers.cascade_pipeline.clean_keys import CleanKeys
from partsong.samplers.cascade_pipeline.frames import CascadeFrames
from partsong.samplers.cascade_pipeline.slots import Cascade
from partsong_zoo.folders import save_pipeline
from partsong_zoo.motion.attention import lookback_blocks
from partsong_zoo.motion.clean_context import WINDOW, cascaded_clip, draw_cascade, seen_blocks, slot_velocity
from partsong_zoo.motion.distillation import few_step_sigmas
from partsong_zoo.motion.model import TEXT_LENGTH, build_pipeline, build_vae, token_ids
from partsong_zoo.motion.world import generator
from partsong_zoo.training.common import World
from tests.recipe_module import assert_refused_before_any_work, loaded
from tests.zoo.test_train_motion import random_animator

CAPTION = "a red circle moves right"


def test_lookback_hides_what_lies_further_back() -> None:
    assert lookback_blocks(3, 1).tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    model, ids = random_animator(4), token_ids([CAPTION])
    noisy, sigma, nulls = torch.randn(1, 4, 12, 8, 8), torch.tensor([0.5]), torch.tensor([18])
    changed = torch.cat([noisy[:, :, :4] + 1, noisy[:, :, 4:]], dim=2)

    def last_block(latents: Tensor, lookback: int | None) -> Tensor:
        return model(latents, sigma, ids, nulls, lookback)[:, :, 8:]

    assert not torch.equal(last_block(noisy, None), last_block(changed, None))
    assert not torch.equal(last_block(noisy, 1), last_block(noisy, None))
    # One layer would tell no difference; two look back twice as far.
    assert not torch.equal(last_block(noisy, 1), last_block(changed, 1))
    torch.testing.assert_close(last_block(noisy, 0), last_block(changed, 0), rtol=0, atol=0)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_blocks_see_what_the_cascade_shows_them(depth: int) -> None:
    cascade = Cascade(blocks=7, steps=4, depth=depth, ranks=1)
    keys = CleanKeys(frames=1, window=WINDOW, sink=0)
    tags = [torch.full((1, 1, 1, 1), float(block)) for block in range(7)]
    for number in range(cascade.slots):
        slot, place = cascade.slot(number), (0, 0)
        if slot.clean is not None:
            keys.take_in(place, slot.clean, tags[slot.clean], tags[slot.clean])
        sees = seen_blocks(slot)
        for block in slot.steps:
            present = {} if block == slot.clean else {b: (tags[b], tags[b]) for b in slot.steps if b != slot.clean}
            around = {int(k) for k, _, _ in keys.around(place, block, present)}
            assert set(sees[block].nonzero().flatten().tolist()) == around | {block}
        keys.drop_old(place)


def test_the_student_computes_what_the_cascade_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_animator(4)
    pipe: Any = build_pipeline(model, build_vae(8))
    pipe.set_progress_bar_config(disable=True)
    knobs: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 31, "max_sequence_length": TEXT_LENGTH}
    knobs |= {"num_inference_steps": 4, "guidance_scale": 1.0, "output_type": "latent", "prompt": CAPTION}
    for layer in model.transformer.blocks:
        layer.attn1.set_processor(SkyReelsV2AttnProcessor())
        layer.attn2.set_processor(SkyReelsV2AttnProcessor())
    calls = _recorded(monkeypatch)
    with parallelize(pipe, CascadePipeline(depth=2)) as plan:
        assert len(list(stream(plan, **knobs, generator=torch.Generator().manual_seed(0)))) == 4
    # Calls come slot by slot, oldest block first; the last block makes no clean call.
    cascade, levels = Cascade(blocks=4, steps=4, depth=2, ranks=1), few_step_sigmas(4)
    here, noise, ids = torch.zeros(1, 4, 16, 8, 8), torch.zeros(1, 4, 16, 8, 8), token_ids([CAPTION])
    for layer in model.transformer.blocks:
        layer.attn1.set_processor(model.attention)
        layer.attn2.set_processor(model.attention)
    # The pipeline rounds its times down, and the student must be asked at the same ones.
    forward = model.transformer.forward
    monkeypatch.setattr(
        model.transformer, "forward", lambda x, time, *more, **knobs: forward(x, time.floor(), *more, **knobs)
    )
    wanted = []
    for number in range(cascade.slots):
        slot, clip = cascade.slot(number), here.clone()
        for block, step in slot.steps.items():
            at = slice(4 * block, 4 * block + 4)
            sample, velocity = calls.pop(0)
            here[:, :, at], clip[:, :, at] = sample, sample - levels[step] * velocity
            noise[:, :, at] = sample if step == 0 else noise[:, :, at]
            if step < 4:
                flown = slot_velocity(model, here, ids, slot)[:, :, at]
                if block == max(slot.steps):  # now the samples of all blocks of the slot are there
                    torch.testing.assert_close(flown, velocity, rtol=0, atol=1e-5)
        wanted.append(clip[:, :, : 4 * max(slot.steps) + 4])
    assert not calls
    for number, clip in enumerate(wanted):
        torch.testing.assert_close(cascaded_clip(model, noise, ids, cascade, number), clip, rtol=0, atol=1e-5)


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Records input and output of every call of the model that computes."""
    calls: list[tuple[Tensor, Tensor]] = []
    run = CascadeFrames.run

    def watched(self: CascadeFrames, named: dict[str, Any]) -> Any:
        calls.append((named["hidden_states"].clone(), torch.empty(0)))
        mine = len(calls) - 1
        output = run(self, named)
        calls[mine] = (calls[mine][0], output[0].clone())
        return output

    monkeypatch.setattr(CascadeFrames, "run", watched)
    return calls


def test_only_estimates_of_blocks_in_flight_have_a_gradient() -> None:
    model = random_animator(4).requires_grad_(True)
    cascade, noise = Cascade(blocks=3, steps=4, depth=2, ranks=1), torch.randn(1, 4, 12, 8, 8)
    for number in range(cascade.lag, cascade.slots):
        done = 4 * (min(block for block, step in cascade.slot(number).steps.items() if step < 4))
        clip = cascaded_clip(model, noise, token_ids([CAPTION]), cascade, number)
        weight = model.transformer.proj_out.weight
        for part, has in ((clip[:, :, :done], False), (clip[:, :, done:], True)):
            gradient = torch.autograd.grad(part.sum(), weight, retain_graph=True)[0]
            assert bool(gradient.any()) == has


def test_slots_of_every_depth_and_moment_are_drawn() -> None:
    drawn = [draw_cascade(3, 4, generator(seed)) for seed in range(300)]
    for depth in (1, 2, 4):
        cascade = Cascade(blocks=3, steps=4, depth=depth, ranks=1)
        assert {last for each, last in drawn if each == cascade} == set(range(cascade.lag, cascade.slots))


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_motion_clean") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, folder: Path) -> Any:
    """A miniature of the recipe."""
    sizes = {"steps": 2, "batch": 1, "blocks": 2, "heads": 1, "depth": 2, "captions": 2, "save_minutes": 0.0}
    return recipe.Config(out=str(out), start=str(folder / "causal"), teacher=str(folder / "all"), device="cpu", **sizes)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    for name, block in (("causal", 4), ("all", 0)):
        save_pipeline(build_pipeline(random_animator(block), build_vae(8)), folder / name)
    return folder


def test_the_recipe_exports_a_stock_folder_that_streams(recipe: ModuleType, teacher: Path, tmp_path: Path) -> None:
    recipe.run(tiny(recipe, tmp_path, teacher), World("cpu"))
    report = json.loads((tmp_path / "facts.json").read_text())
    assert report["captions"] == 2 and 0.0 <= report["facts_read"] <= 1.0
    assert (tmp_path / "samples.png").is_file()
    pipe: Any = DiffusionPipeline.from_pretrained(tmp_path / "export" / "motion-clean")
    before: Any = DiffusionPipeline.from_pretrained(teacher / "causal")
    assert type(pipe) is WanPipeline and pipe.transformer.config.num_frame_per_block == 4
    for part, changes in (("vae", False), ("text_encoder", False), ("transformer", True)):
        held, was = (list(getattr(each, part).state_dict().values()) for each in (pipe, before))
        assert any(not torch.equal(a, b) for a, b in zip(held, was, strict=True)) == changes


def test_a_wrong_folder_is_refused_before_any_work(recipe: ModuleType, teacher: Path, tmp_path: Path) -> None:
    for folder, heads, message in (
        ("nowhere", 1, "has no model_index.json"),
        (str(teacher / "causal"), 2, "give the recipe"),
    ):
        config = dataclasses.replace(tiny(recipe, tmp_path / "new", teacher), start=folder, heads=heads)
        assert_refused_before_any_work(recipe, config, message)
