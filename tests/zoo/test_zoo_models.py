"""The shipped weights: a stock folder that loads without this package and draws what captions say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline, StableDiffusionPipeline, WanPipeline

from partsong import CascadePipeline, ExpertMixture, Plan, generate, parallelize, zoo
from partsong.errors import PartsongError
from partsong.samplers.any_order import LPD
from partsong_zoo.motion.scoring import score as motion_score
from partsong_zoo.shapes.reader import facts
from partsong_zoo.shapes.scoring import score
from partsong_zoo.tiles.scoring import score_tiles
from tests import covering

FOLDER = zoo.MODELS["shapes"].folder
#: Bytes of a folder at most, and of folders that shall be smaller.
MOST_BYTES = 30_000_000
LIMIT_BYTES = {
    **{"shapes": 25_000_000, "shapes-unet": 15_000_000, "motion": 15_000_000, "motion-causal": 15_000_000},
    **{"motion-clean": 15_000_000, "shapes-experts": 12_000_000, "tiles": 7_000_000},
    **{"lists-mdlm": 10_000_000, "lists-ar": 10_000_000, "sums": 10_000_000, "products": 4_000_000},
}


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    loaded = DiffusionPipeline.from_pretrained(FOLDER)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def files(name: str) -> list[Path]:
    return [path for path in zoo.MODELS[name].folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", zoo.MODELS)
def test_folder_holds_safetensors_and_text_only(name: str) -> None:
    assert {path.suffix for path in files(name)} <= {".safetensors", ".json", ".md", ".txt", ".jinja"}
    assert sum(path.stat().st_size for path in files(name)) < LIMIT_BYTES.get(name, MOST_BYTES)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_weights_are_half_precision(name: str) -> None:
    from safetensors import safe_open

    for path in zoo.MODELS[name].folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
        assert kinds == {"F16"}, path


def test_folder_loads_stock(pipeline: StableDiffusion3Pipeline) -> None:
    index = json.loads((FOLDER / "model_index.json").read_text())
    libraries = {value[0] for value in index.values() if isinstance(value, list)}
    assert libraries == {None, "diffusers", "transformers"}  # None: optional parts that are not there
    assert type(pipeline) is StableDiffusion3Pipeline
    kinds = {p.dtype for part in pipeline.components.values() if hasattr(part, "parameters") for p in part.parameters()}
    assert kinds == {torch.float32}


@pytest.mark.full
def test_plain_call_works_with_all_defaults(pipeline: StableDiffusion3Pipeline) -> None:
    caption = "a red circle left of a blue square"
    image = pipeline(caption, generator=torch.Generator().manual_seed(0)).images[0]
    assert image.size == (64, 64)
    assert (zoo.shapes.facts_read(caption, image) or 0.0) >= 0.5


def test_serial_samples_show_the_facts(pipeline: StableDiffusion3Pipeline) -> None:
    num, steps = (12, 14) if covering.FULL else (8, 10)
    asked = zoo.MODELS["shapes"].defaults | {"num_inference_steps": steps}
    result = score(pipeline, num, seed=5, batch=num, **asked)
    assert result.facts_read >= 0.85
    assert result.images.shape == (num, 64, 64, 3)
    assert result.grid(columns=3).shape == (-(-num // 3) * 64, 3 * 64, 3)
    kinds = result.by_kind()
    assert kinds["count"][1] == num
    assert 0.0 <= result.all_right <= 1.0


@pytest.mark.full
def test_the_unet_is_a_stock_stable_diffusion_pipeline_that_draws() -> None:
    loaded = zoo.load("shapes-unet")
    assert type(loaded) is StableDiffusionPipeline
    loaded.set_progress_bar_config(disable=True)
    num = 12 if covering.FULL else 6
    result = score(loaded, num, seed=5, batch=num, **zoo.MODELS["shapes-unet"].defaults | {"num_inference_steps": 10})
    assert result.facts_read >= 0.8
    assert result.by_kind()["relation"][0] >= 0.7


@pytest.mark.parametrize("name", ["shapes", "shapes-unet", "motion", "motion-causal", "motion-clean"])
def test_words_that_a_model_does_not_know_have_features_like_any_others(name: str) -> None:
    loaded = zoo.load(name)
    words = {"return_tensors": "pt", "truncation": True, "max_length": 20}
    ids = loaded.tokenizer(["a red dog, ünlike 7 others!"], **words).input_ids
    features = loaded.text_encoder(ids)[0]
    assert bool(features.isfinite().all())


@pytest.mark.parametrize(
    ("steps", "least"), [*(pytest.param(*case, marks=pytest.mark.full) for case in ((4, 0.95), (2, 0.9))), (1, 0.86)]
)
def test_the_few_step_model_draws_in_so_many_calls_what_captions_say(steps: int, least: float) -> None:
    loaded, calls, row = zoo.load("shapes-few"), list[int](), zoo.MODELS["shapes-few"]
    assert type(loaded) is StableDiffusion3Pipeline
    loaded.set_progress_bar_config(disable=True)
    loaded.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    result = score(loaded, 40, seed=5, batch=40, **row.defaults | {"num_inference_steps": steps})
    assert len(calls) == steps
    assert result.facts_read >= least


def test_the_weights_together_stay_small() -> None:
    assert sum(path.stat().st_size for name in zoo.MODELS for path in files(name)) <= 120_000_000


@pytest.mark.full
def test_the_experts_draw_what_captions_say_and_only_those_that_are_asked_are_loaded() -> None:
    loaded = zoo.load("shapes-experts")
    mixture = loaded.transformer
    assert isinstance(mixture, ExpertMixture)
    assert (mixture.num_experts, mixture.top_k, len(mixture.loaded)) == (4, 1, 0)
    loaded.set_progress_bar_config(disable=True)
    defaults = zoo.MODELS["shapes-experts"].defaults
    num, steps = (12, 14) if covering.FULL else (6, 10)
    result = score(loaded, num, seed=5, batch=num, **defaults | {"num_inference_steps": steps})
    assert result.facts_read >= 0.85
    assert 0 < len(mixture.loaded) <= 4
    assert zoo.complete("shapes", loaded) is loaded and zoo.complete(None, loaded).transformer is mixture


@pytest.mark.parametrize(
    ("name", "steps", "num", "least"),
    [
        ("motion-causal", 2, 4, 0.7),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *(("motion", 10, 4, 0.8), ("motion", 10, 8, 0.8)),
                *(("motion-causal", 4, 12, 0.7), ("motion-causal", 2, 12, 0.7)),
            )
        ),
    ],
)
def test_the_video_models_are_stock_wan_pipelines_that_animate(name: str, steps: int, num: int, least: float) -> None:
    row, loaded = zoo.MODELS[name], zoo.load(name)
    assert type(loaded) is WanPipeline
    assert row.kind == "video"
    loaded.set_progress_bar_config(disable=True)
    result = motion_score(loaded, num, seed=3, batch=8, **row.defaults | {"num_inference_steps": steps})
    assert result.videos.shape == (num, 31, 32, 32, 3)
    assert result.facts_read >= least
    assert result.identity_kept >= least


def test_the_clean_model_animates_with_blocks_in_flight() -> None:
    row, loaded = zoo.MODELS["motion-clean"], zoo.load("motion-clean")
    loaded.set_progress_bar_config(disable=True)
    with parallelize(loaded, CascadePipeline(depth=4)) as plan:
        result = motion_score(plan_call(plan), 4, seed=3, batch=4, **row.defaults)
    assert type(loaded) is WanPipeline
    assert result.facts_read >= 0.7 and result.identity_kept >= 0.7


def plan_call(plan: Plan) -> Any:
    """A plan's loop, called as a pipeline is."""
    return lambda texts, **named: generate(plan, prompt=texts, **named)


def test_the_tiles_model_draws_in_groups_what_captions_say() -> None:
    loaded = zoo.load("tiles")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    assert type(loaded.pictures).__name__ == "VQModel"
    result = score_tiles(loaded, LPD(steps=8), 40, seed=5)
    assert result.images.shape == (40, 64, 64, 3)
    assert result.facts_read >= 0.65
    shuffled = [facts(text, image) for text, image in zip(result.captions, result.images[::-1], strict=True)]
    chance = np.mean([held for row in shuffled for held in row.values()])
    assert chance < result.facts_read - 0.15, "another caption's picture must not do as well"


def test_longest_caption_fits_the_tokenizer(pipeline: StableDiffusion3Pipeline) -> None:
    captions = [
        *zoo.shapes.captions(200, seed=11),
        "a small red circle at the top left and a large blue cross at the top",
    ]
    ids = pipeline.tokenizer(captions).input_ids
    assert max(len(row) for row in ids) <= pipeline.tokenizer.model_max_length
    assert not any(pipeline.tokenizer.unk_token_id in row for row in ids)


def test_registry_row() -> None:
    row = zoo.MODELS["shapes"]
    assert (row.name, row.kind, row.license) == ("shapes", "image", "Apache-2.0")
    assert row.task is zoo.shapes
    assert {"num_inference_steps", "guidance_scale", "height", "width"} <= set(row.defaults)


def test_unknown_model() -> None:
    with pytest.raises(PartsongError, match="known: shapes"):
        zoo.load("forms")


def test_load_in_half_precision() -> None:
    loaded = zoo.load("shapes", dtype=torch.bfloat16)
    assert {loaded.transformer.dtype, loaded.vae.dtype, loaded.text_encoder.dtype} == {torch.bfloat16}


@pytest.mark.parametrize("name", zoo.MODELS)
def test_folder_names_no_path_of_the_machine_that_made_it(name: str) -> None:
    for path in zoo.MODELS[name].folder.rglob("*.json"):
        assert "_name_or_path" not in path.read_text(), path
