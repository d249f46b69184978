"""The motion recipe runs from nothing to two stock folders, and continues an interrupted run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanPipeline
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2AttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.samplers.pipeline.scheduler_checks import check_memoryless
from partsong_zoo import motion
from partsong_zoo.few_steps import build_few_step_scheduler
from partsong_zoo.motion.clips import decode_clip, encode_clip
from partsong_zoo.motion.distillation import distillation_loss, few_step_sigmas, guided_walk, own_walk, step_odds
from partsong_zoo.motion.forcing import Forcing, matching_sigmas, own_clip
from partsong_zoo.motion.layouts import draw_layouts
from partsong_zoo.motion.model import (
    SHIFT,
    TEXT_LENGTH,
    build_scheduler,
    build_tokenizer,
    build_vae,
    decoder_loss,
    draw_sigmas,
    encode_text,
    token_ids,
    vae_loss,
)
from partsong_zoo.motion.training import Animator, ClipPool, Windows, count_nulls, draw_clips, window_length
from partsong_zoo.motion.world import generator, layout
from partsong_zoo.training.common import World
from tests.recipe_module import assert_refused_before_any_work, loaded

CAPTIONS = ["a red circle moves right", "a big blue square bounces up and down slowly, a red circle moves left"]


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_motion") as module:
        yield module


def tiny(recipe: ModuleType, out: Path) -> Any:
    """A miniature of the recipe that saves after every step."""
    stages = ("vae", "decoder", "text", "motion", "causal", "distil", "halve", "force")
    lengths = {f"{stage}_steps": 2 for stage in stages} | {"save_minutes": 0.0}
    sizes = {"vae_batch": 1, "vae_channels": 8, "pool_size": 4, "text_batch": 4, "heads": 1, "depth": 1}
    measured = {"captions": 2, "steps": 3, "motion_tokens": 16, "distil_tokens": 16}
    return recipe.Config(out=str(out), device="cpu", **lengths, **sizes, **measured)


@pytest.fixture(scope="module")
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    recipe.run(tiny(recipe, out), World("cpu"))
    return out


def random_animator(block: int = 0) -> Animator:
    """An animator without the zeros it starts with."""
    torch.manual_seed(0)
    model = Animator(1, 2, block)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return model.requires_grad_(False)


@pytest.mark.parametrize("name", ["motion", "motion-causal"])
@pytest.mark.slow
def test_the_folders_are_stock_and_sample(finished: Path, name: str) -> None:
    report = json.loads((finished / f"facts-{name}.json").read_text())
    assert report["captions"] == 2
    assert 0.0 <= report["facts_read"] <= 1.0
    assert report["num_inference_steps"] == (2 if name == "motion-causal" else 3)
    assert (finished / f"samples-{name}.png").is_file()
    folder = finished / "export" / name
    index = json.loads((folder / "model_index.json").read_text())
    assert {value[0] for value in index.values() if isinstance(value, list)} == {None, "diffusers", "transformers"}
    pipeline: Any = DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline) is WanPipeline
    parts = (pipeline.transformer, pipeline.vae, pipeline.text_encoder)
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float32}
    assert pipeline.transformer.config.get("num_frame_per_block", 0) == (4 if name == "motion-causal" else 0)
    pipeline.set_progress_bar_config(disable=True)
    video = pipeline(CAPTIONS[0], height=32, width=32, num_frames=15, num_inference_steps=2).frames[0]
    assert video.shape == (15, 32, 32, 3)
    assert np.isfinite(video).all()


def test_a_resumed_recipe_holds_what_was_saved(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "again")
    stage = recipe.motion_stage(tiny(recipe, tmp_path / "again"), World("cpu"))
    saved = torch.load(finished / "motion.pt", weights_only=True)
    assert stage.step == saved["step"] == 2
    held = [stage.module.state_dict(), stage.average.module.state_dict()]
    torch.testing.assert_close(held, [saved["model"], saved["average"]], rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("name", ["motion", "causal", "distil", "halve", "force"])
def test_an_interrupted_stage_makes_the_steps_it_would_have_made(
    recipe: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    drawn: list[Tensor] = []
    draw = ClipPool.draw

    def watched(self: ClipPool, *arguments: Any) -> Windows:
        if interrupted and len(drawn) == 1:
            raise KeyboardInterrupt
        windows = draw(self, *arguments)
        drawn.append(windows.clean)
        return windows

    monkeypatch.setattr(ClipPool, "draw", watched)
    run = getattr(recipe, f"train_{name}")
    for out in ("straight", "stopped"):
        shutil.copytree(finished, tmp_path / out)
        (tmp_path / out / f"{name}.pt").unlink()
    interrupted = False
    run(tiny(recipe, tmp_path / "straight"), World("cpu"))
    straight, interrupted = drawn[:], True
    drawn.clear()
    with pytest.raises(KeyboardInterrupt):
        run(tiny(recipe, tmp_path / "stopped"), World("cpu"))
    interrupted = False
    run(tiny(recipe, tmp_path / "stopped"), World("cpu"))
    assert len(drawn) == len(straight) == 2
    assert all(torch.equal(a, b) for a, b in zip(drawn, straight, strict=True))


def test_the_decoder_stage_leaves_the_encoder_alone(recipe: ModuleType, finished: Path) -> None:
    before, after = AutoencoderKLWan.from_pretrained(finished / "vae"), recipe.load_autoencoder(finished)
    for name, weight in before.state_dict().items():
        fixed = name.startswith(("encoder", "quant_conv"))
        assert torch.equal(weight, after.state_dict()[name]) or not fixed, name
    assert not torch.equal(before.decoder.conv_in.weight, after.decoder.conv_in.weight)


@torch.no_grad()
def test_whole_clips_are_coded_as_the_stock_walk_codes_them() -> None:
    torch.manual_seed(0)
    vae, video = build_vae(8).double(), torch.rand(2, 3, 13, 32, 32, dtype=torch.float64) - 0.5
    coded = encode_clip(vae, video)
    torch.testing.assert_close(coded, vae.encode(video).latent_dist.parameters)
    for num in (1, 2, 7):
        latents = coded[:, :4, :num]
        torch.testing.assert_close(decode_clip(vae, latents).clamp(-1, 1), vae.decode(latents).sample)


@torch.no_grad()
def test_a_block_decoded_alone_is_asked_for_the_later_frame_of_its_first_latent() -> None:
    torch.manual_seed(0)
    vae, video = build_vae(8), draw_clips(generator(1), 1, 13)
    mean = encode_clip(vae, video).chunk(2, dim=1)[0]
    wrong = torch.cat([video[:, :, :6], -video[:, :, 6:]], dim=2)
    unseen = torch.cat([-video[:, :, :6], video[:, :, 6:]], dim=2)
    torch.manual_seed(1)
    loss = decoder_loss(vae, mean, video, 3, 4)
    torch.manual_seed(1)
    assert decoder_loss(vae, mean, unseen, 3, 4) == loss
    torch.manual_seed(1)
    assert decoder_loss(vae, mean, wrong, 3, 4) != loss
    assert torch.isfinite(vae_loss(vae, video, 3, 4)[0])


@pytest.mark.parametrize(("block", "stock"), [(0, WanAttnProcessor), (4, SkyReelsV2AttnProcessor)])
@pytest.mark.parametrize("length", [TEXT_LENGTH, 60])
def test_training_attention_is_the_stock_one_at_any_text_length(block: int, stock: type, length: int) -> None:
    model = random_animator(block).double()
    ids = token_ids(CAPTIONS)
    noisy, sigma = torch.randn(2, 4, 8, 8, 8, dtype=torch.float64), torch.tensor([0.5, 0.25], dtype=torch.float64)
    ours = model(noisy, sigma, ids, length - (ids != 0).sum(dim=1))
    padded = encode_text(model.text, torch.cat([ids, ids.new_zeros(2, length - TEXT_LENGTH)], dim=1))
    for layer in model.transformer.blocks:
        layer.attn1.set_processor(stock())
        layer.attn2.set_processor(stock())
    wanted = model.transformer(noisy, sigma * 1000, padded, return_dict=False)[0]
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


def test_tokenizer_has_one_token_per_word() -> None:
    tokenizer, captions = build_tokenizer(), ["", *motion.captions(100, seed=4)]
    assert torch.equal(tokenizer(captions, padding="max_length", return_tensors="pt").input_ids, token_ids(captions))
    assert tokenizer("A red zebra").input_ids[:2] == tokenizer("a red").input_ids[:2]
    assert tokenizer.unk_token_id in tokenizer("a red zebra").input_ids


def test_windows_are_cut_from_anywhere_and_told_by_their_captions() -> None:
    latents = torch.arange(3 * 16).reshape(3, 1, 16, 1, 1).half()
    scenes = [motion.parse(f"a {colour} circle moves up") for colour in ("red", "blue", "green")]
    clips = [(scene, layout(scene, generator(2))) for scene in scenes]
    pool = ClipPool(latents, clips, 5, torch.device("cpu"))
    windows = pool.draw(generator(1), 64, 8, 0.25)
    clean, ids = windows.clean, windows.ids
    firsts = clean[:, 0, 0, 0, 0]
    assert torch.equal(clean[:, 0, :, 0, 0], firsts[:, None] + torch.arange(8))
    assert set((firsts % 16).int().tolist()) == set(range(9))
    named = token_ids([f"a {colour} circle moves up" for colour in ("red", "blue", "green")])
    empty = (ids[:, 1:] == 0).all(dim=1)
    assert 4 < int(empty.sum()) < 30
    assert torch.equal(ids[~empty], named[(firsts[~empty] // 16).long()])
    for first, drawn in zip(firsts.int().tolist(), windows.layouts(), strict=True):
        np.testing.assert_array_equal(drawn, draw_layouts(clips[first // 16][1], 5 + first % 16, 8))


def test_windows_grow_as_training_goes_on() -> None:
    rng = generator(2)
    assert {window_length(0.1, rng) for _ in range(20)} == {4}
    assert {window_length(0.3, rng) for _ in range(20)} == {8}
    assert {window_length(0.9, rng) for _ in range(60)} == {8, 12, 16}


def test_noise_levels_are_drawn_as_the_scheduler_shifts_them() -> None:
    sigma = draw_sigmas(20_000, generator(3))
    assert float(sigma.min()) >= 0 and float(sigma.max()) <= 1
    assert float(sigma.median()) == pytest.approx(SHIFT / (1 + SHIFT), abs=0.02)
    scheduler: Any = build_scheduler()
    scheduler.set_timesteps(20)
    assert float(scheduler.sigmas[0]) == 1.0


def test_few_steps_are_plain_euler_steps_without_a_memory() -> None:
    scheduler: Any = build_few_step_scheduler(SHIFT)
    scheduler.set_timesteps(4)
    even = np.asarray([1.0, 0.75, 0.5, 0.25, 0.0])
    np.testing.assert_allclose(few_step_sigmas(), SHIFT * even / (1 + (SHIFT - 1) * even), atol=2e-3)
    check_memoryless(scheduler, torch.zeros(1, 4, 4, 8, 8))
    here = start = torch.randn(2, 4)
    for index, time in enumerate(scheduler.timesteps):
        velocity = torch.sin(here)
        wanted = here + (few_step_sigmas()[index + 1] - few_step_sigmas()[index]) * velocity
        here = scheduler.step(velocity, time, here, return_dict=False)[0]
        torch.testing.assert_close(here, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(here, start)


def test_a_guided_walk_is_guided_euler_steps() -> None:
    model, ids = random_animator(block=4), token_ids(CAPTIONS)
    start, first, last = torch.randn(2, 4, 8, 8, 8), torch.tensor([1.0, 0.9]), torch.tensor([0.9, 0.75])
    arrival = guided_walk(model, start, (first, last), ids, substeps=2, guidance=3.0, lookback=None)
    here = start
    for step in range(2):
        sigma = first + (last - first) * step / 2
        stated, silent = (
            model(here, sigma, tokens, TEXT_LENGTH - (tokens != 0).sum(dim=1)) for tokens in (ids, token_ids(["", ""]))
        )
        here = here + ((last - first) / 2).view(2, 1, 1, 1, 1) * (silent + 3.0 * (stated - silent))
    torch.testing.assert_close(arrival, here, rtol=1e-4, atol=1e-4)


def test_a_student_that_is_its_unguided_one_step_teacher_has_nothing_to_learn() -> None:
    model, ids = random_animator(block=4), token_ids(CAPTIONS)
    clean, rng = torch.randn(2, 4, 8, 8, 8), generator(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partsong_zoo.motion.distillation.draw_nulls", lambda ids, _: count_nulls(ids))
        same, other = (
            float(distillation_loss(model, model, clean, ids, rng, substeps=1, guidance=g, lookback=None))
            for g in (1.0, 3.0)
        )
    assert same < 1e-9 < 1e-5 < other


def test_own_walks_end_after_each_samples_steps() -> None:
    model, ids = random_animator(block=4), token_ids(CAPTIONS)
    noise = torch.randn(2, 4, 8, 8, 8)
    walked = own_walk(model, noise, ids, torch.tensor([0, 2]), None)
    assert torch.equal(walked[0], noise[0])
    longer = own_walk(model, noise, ids, torch.tensor([2, 2]), None)
    torch.testing.assert_close(walked[1], longer[1])
    assert not torch.equal(longer[0], noise[0])


def test_the_first_of_a_few_steps_is_trained_most() -> None:
    assert step_odds(4) == [0.4, 0.2, 0.2, 0.2]
    assert step_odds(2) == [2 / 3, 1 / 3]


@pytest.mark.parametrize("step", [0, 1])
def test_an_own_clip_is_what_the_student_sees_at_a_step_of_its_own(step: int) -> None:
    model, ids = random_animator(block=4), token_ids(CAPTIONS)
    noise, nulls, sigmas = torch.randn(2, 4, 8, 8, 8), count_nulls(ids), few_step_sigmas(2)
    here = noise
    for past in range(step):
        level = torch.full((2,), sigmas[past])
        here = here + (sigmas[past + 1] - sigmas[past]) * model(here, level, ids, nulls, 1)
    wanted = here - sigmas[step] * model(here, torch.full((2,), sigmas[step]), ids, nulls, 1)
    got = own_clip(model, noise, ids, step=step, num_steps=2, lookback=1)
    torch.testing.assert_close(got, wanted)


def test_only_the_last_step_of_an_own_clip_has_a_gradient() -> None:
    model, ids = random_animator(block=4).requires_grad_(True), token_ids(CAPTIONS[:1])
    noise = torch.randn(1, 4, 4, 8, 8, requires_grad=True)
    own_clip(model, noise, ids, step=1, num_steps=2, lookback=None).sum().backward()
    assert noise.grad is None, "the walk before it is a constant"
    own_clip(model, noise, ids, step=0, num_steps=2, lookback=None).sum().backward()
    assert noise.grad is not None and bool(noise.grad.any())


def test_clips_move_from_the_model_of_them_to_the_teacher() -> None:
    """Where both agree there is nothing to learn."""
    ids, clip = token_ids(CAPTIONS), torch.randn(2, 4, 8, 8, 8)
    teacher, fake = random_animator(), random_animator()
    forcing = Forcing(teacher=teacher, guidance=1.0)
    same, learned = forcing.losses(clip, fake, ids, generator(6))
    assert float(same) < 1e-8 < 1e-3 < float(learned)
    for weight in fake.parameters():
        weight.mul_(1.1)
    other, _ = forcing.losses(clip, fake, ids, generator(6))
    assert float(other) > 1e-3
    guided, _ = Forcing(teacher=teacher, guidance=3.0).losses(clip, fake, ids, generator(6))
    assert not torch.equal(guided, other)


def test_noise_levels_of_comparisons_are_even_before_the_shift() -> None:
    level = matching_sigmas(4000, generator(7))
    even = level / (SHIFT - (SHIFT - 1) * level)
    assert float(even.min()) >= 0.02 - 1e-6 and float(even.max()) <= 0.98 + 1e-6
    assert float(even.mean()) == pytest.approx(0.5, abs=0.02)


def test_a_pipeline_is_trained_on(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    start = finished / "export" / "motion"
    config = dataclasses.replace(tiny(recipe, tmp_path), start=str(start), stages="vae,decoder,pool,text")
    recipe.run(config, World("cpu"))
    assert not (tmp_path / "text.pt").exists()
    stage = recipe.motion_stage(config, World("cpu"))
    pipeline: Any = DiffusionPipeline.from_pretrained(start)
    given, taught = pipeline.vae.state_dict(), recipe.load_autoencoder(tmp_path).state_dict()
    assert {n.split(".")[0] for n in given if not torch.equal(given[n], taught[n])} == {"decoder", "post_quant_conv"}
    assert all(float((given[n] - taught[n]).abs().max()) < 0.1 for n in given)
    for name, weight in pipeline.transformer.state_dict().items():
        torch.testing.assert_close(stage.module.transformer.state_dict()[name], weight, rtol=0, atol=0)
    assert stage.step == 0 and (tmp_path / "pool-0-of-1.npy").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "nothing"}, "cannot begin with 'nothing': it has no model_index.json"),
        ({"heads": 2}, "cannot begin with .*: its .* is .*, and this recipe's is .*; give the recipe the sizes"),
    ],
)
def test_a_wrong_pipeline_to_begin_with_is_refused_before_any_work(
    recipe: ModuleType, finished: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    start = {"start": str(finished / "export" / "motion")}
    assert_refused_before_any_work(
        recipe, dataclasses.replace(tiny(recipe, tmp_path / "new"), **start | changes), message
    )


def test_a_pool_of_other_clips_is_refused(recipe: ModuleType, finished: Path) -> None:
    for changes in ({"pairs": 1.0}, {"seed": 9}, {"pool_size": 3}):
        config = dataclasses.replace(tiny(recipe, finished), **changes)
        with pytest.raises(ArgumentError, match=r"pool-0-of-1\.npy holds other clips than this seed, pool_size"):
            recipe.own_pool(config, World("cpu"))
