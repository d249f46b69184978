"""StructureGuidance: the same picture on any number of ranks, its definition, and the plain pipeline in one patch."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

from partsong import StructureGuidance, parse_strategy, zoo
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import Mesh, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate
from partsong.samplers.structure_guidance.estimates import Prediction
from partsong.samplers.structure_guidance.object_mask import ObjectMask
from partsong.samplers.structure_guidance.pictures import PictureForm
from partsong.samplers.structure_guidance.strategy import PatchGrid, grid_for
from tests import covering
from tests.parallel import structure_worker as worker
from tests.parallel.ranks import error
from tests.pipelines.cases import CASES
from tests.recipe_module import loaded

RANKS = (1, 2, 3) if covering.FULL else (1, 2)
#: By default two ranks make a picture of each kind of model and guide.
USUAL = {2: ("trained SD", "SD", "SD, attention", "SDXL", "SD3", "Klein, prediction")}
#: One rank makes what those of others are compared with.
USUAL[1] = (*worker.TRAINED_CASES, *USUAL[2])
EVERY = (*worker.TRAINED_CASES, *worker.CASES)
LABELS = {nproc: [label for label in EVERY if covering.FULL or label in USUAL[nproc]] for nproc in RANKS}
WIDE = [(nproc, label) for nproc in RANKS for label in LABELS[nproc] if label in worker.CASES]


@functools.cache  # one launch per number of ranks
def results(nproc: int) -> dict[str, list[Any]]:
    return launch(worker.run, nproc, nproc, LABELS[nproc])


@functools.cache
def refusals(nproc: int) -> dict[str, list[str]]:
    return launch(worker.scenarios, nproc, nproc)


@pytest.mark.parametrize("nproc", RANKS)
def test_one_patch_is_the_plain_pipeline(nproc: int) -> None:
    for label in LABELS[nproc]:
        if label in worker.TRAINED_CASES:
            assert all(row["error"] <= 1e-10 for row in results(nproc)[label]), label


@pytest.mark.parametrize(("nproc", "label"), WIDE)
def test_the_picture_does_not_depend_on_the_number_of_ranks(nproc: int, label: str) -> None:
    want = results(1)[label][0]["picture"]
    assert want.isfinite().all()
    assert all(error(row["picture"], want) <= 1e-10 for row in results(nproc)[label])


@pytest.mark.parametrize(("nproc", "label"), [*WIDE, *itertools.product(RANKS, ("trained SD", "decoder"))])
def test_counted_bytes_are_the_predicted_ones(nproc: int, label: str) -> None:
    for row in results(nproc)[label]:
        counted, predicted = row["total"]
        assert counted == predicted
        assert (counted > 0) == (nproc > 1)
        if label != "decoder":  # the decoder's bytes are in no step
            assert row["by step"][0] == row["by step"][1]
        assert row["clean"]


@pytest.mark.parametrize("nproc", RANKS)
def test_the_decoder_may_be_cut_as_well(nproc: int) -> None:
    want = results(1)["SD"][0]["picture"]
    assert all(error(row["picture"], want) <= 1e-10 for row in results(nproc)["decoder"])


def test_work_is_dealt_out_evenly_and_the_small_picture_ends_with_its_use() -> None:
    """Four steps and four patches; the small picture's first estimate is read in two steps, later ones in one."""
    assert [row["forwards"] for row in results(2)["SDXL"]] == [8 + 3, 8]  # a guide to the end, read in steps 0 to 3


@pytest.mark.full
def test_three_ranks_deal_out_the_work_evenly() -> None:
    assert [row["forwards"] for row in results(3)["SD, prediction"]] == [8, 4 + 1, 4]  # read in steps 0 and 1


@pytest.mark.parametrize("name", ["SD3", "Flux"])
@torch.no_grad()
def test_equals_its_definition(name: str) -> None:
    with Mesh() as mesh:
        got = worker.sample(worker.pipeline(name), mesh, worker.named(name, worker.WIDE), power=1.0)["picture"]
    if name == "Flux":
        got = PictureForm(is_packed=True).picture(got, (16, 12))
    assert error(got, worker.defined(name)) <= 1e-6  # the scheduler itself steps in float32


def test_packed_channels_are_enlarged_as_they_were_before_they_were_normalized() -> None:
    vae = worker.pipeline("Flux 2").vae
    mean, variance = (value.view(1, -1, 1, 1).double() for value in (vae.bn.running_mean, vae.bn.running_var))
    form = PictureForm(is_packed=True, is_normalized=True)

    def normalized(picture: torch.Tensor) -> torch.Tensor:
        packed = torch.nn.functional.pixel_unshuffle(picture, 2)
        return torch.nn.functional.pixel_shuffle((packed - mean) / (variance + vae.config.batch_norm_eps).sqrt(), 2)

    plain = torch.randn(1, 4, 8, 6, dtype=torch.float64)
    grown = torch.nn.functional.interpolate(plain, scale_factor=2, mode="bilinear")
    assert error(form.enlarged(normalized(plain), 2, vae), normalized(grown)) <= 1e-12


def test_both_pictures_have_the_schedule_of_the_large_one() -> None:
    """Flux shifts its noise levels by the picture's size; the plain pipeline at either size has others."""
    pipe = worker.pipeline("Flux")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    times: dict[int, list[float]] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        times.setdefault(kwargs["hidden_states"].shape[1], []).append(float(kwargs["timestep"][0]))

    with Mesh() as mesh:
        hook = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
        worker.sample(pipe, mesh, worker.named("Flux", worker.WIDE), until=0.0, overlap=0.0)
        hook.remove()
    assert len(set(times.pop(4 * 3))) == worker.STEPS
    assert not times


REFUSED = {
    "callback": ("UnsupportedError", "callback_on_step_end cannot be honoured"),
    "size": ("UnsupportedError", "latents of 16 x 10 are no multiple of 4"),
    "scheduler": ("UnsupportedError", "EDMEulerScheduler"),
    "pipeline": ("UnsupportedError", "StableDiffusionControlNetPipeline"),
    "model": ("UnsupportedError", "Stable Diffusion, Flux, Qwen-Image and PixArt only"),
    "bins": ("UnsupportedError", "give use_resolution_binning=False"),
    "reference": ("UnsupportedError", "a reference picture has no place in the patches"),
    "no start": ("UnsupportedError", "no first token"),
    "bare model": ("UnsupportedError", "give it a pipeline"),
    "composed": ("UnsupportedError", "does not compose with CfgParallel"),
    "plain call": ("ArgumentError", "use generate(plan, ...)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks_alike(name: str) -> None:
    kind, text = REFUSED[name]
    first, second = refusals(2)[name]
    assert first == second
    assert first.startswith(kind)
    assert text in first


@pytest.mark.parametrize(
    "knobs", [{"overlap": 1.0}, {"weight": -0.1}, {"until": 1.0}, {"power": -1}, {"mask": "all"}, {"training_size": 0}]
)
def test_meaningless_knobs_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="StructureGuidance"):
        StructureGuidance(**knobs).validate()


def test_knobs_on_the_command_line() -> None:
    said = parse_strategy("structure-guidance:until=0.5,mask=attention,training_size=64")
    assert said == StructureGuidance(until=0.5, mask="attention", training_size=64)


def test_the_weight_falls_to_zero_and_stays_there() -> None:
    weights = [StructureGuidance(weight=0.8, until=0.5, power=2).weight_at(noise / 8) for noise in range(8, 0, -1)]
    assert weights == pytest.approx([0.8, 0.45, 0.2, 0.05, 0, 0, 0, 0])
    assert [StructureGuidance(power=0, until=0.5).weight_at(noise) for noise in (0.51, 0.5)] == [1, 0]


@pytest.mark.parametrize("size", [(32, 32), (48, 32), (33, 48)])
@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.7])
def test_patches_of_a_picture_blend_to_the_picture(size: tuple[int, int], overlap: float) -> None:
    grid = grid_for(size, (16, 16), overlap, 1) if size[0] % 2 == 0 else PatchGrid(1, (16, 16), (0, 7, 17), (0, 16, 32))
    whole = torch.randn(2, 3, *size, dtype=torch.float64)
    parts = [whole[..., rows, columns] for rows, columns in grid.places]
    assert all(part.shape[-2:] == grid.patch for part in parts)
    assert error(grid.blend(parts, torch.empty_like(whole)), whole) <= 1e-14


@pytest.mark.full
def test_a_trained_model_draws_one_scene_and_not_one_per_patch() -> None:
    """At twice its size the zoo's model alone repeats objects; guided it draws what the prompt says."""
    pipe = zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    prompt = "a red circle left of a blue square"
    arguments = {**zoo.MODELS["shapes"].defaults, "height": 128, "width": 128, "num_inference_steps": 8}
    arguments |= {"prompt": prompt, "guidance_scale": 2.5}

    def facts(output: Any) -> float:
        return zoo.shapes.facts_read(prompt, output.images[0].resize((64, 64))) or 0.0

    plain = facts(pipe(**arguments, generator=torch.Generator().manual_seed(1)))
    with parallelize(pipe, StructureGuidance()) as plan:
        guided = facts(generate(plan, **arguments, generator=torch.Generator().manual_seed(1)))
    assert guided >= max(plain, 0.8)


SCHEDULERS = {
    "noise": DDIMScheduler(),
    "velocity": DDIMScheduler(prediction_type="v_prediction"),
    "sample": DDIMScheduler(prediction_type="sample"),
    "scaled": EulerDiscreteScheduler(),
    "flow": FlowMatchEulerDiscreteScheduler(shift=3.0),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_estimates_of_the_clean_sample(kind: str) -> None:
    """A model that knows sample and noise: every scheduler's latents lead back to the sample, or to a moved one."""
    scheduler: Any = SCHEDULERS[kind]
    scheduler.set_timesteps(7)
    reads = Prediction(scheduler)
    clean, noise, change = torch.randn(3, 1, 4, 8, 8, dtype=torch.float64)
    for index, time in enumerate(scheduler.timesteps):
        if kind == "flow":
            level = float(time) / 1000
            inputs, output = (1 - level) * clean + level * noise, noise - clean
        else:
            kept = scheduler.alphas_cumprod[int(time)].double()
            if kind == "scaled":  # its timesteps lie between those of the training
                kept = 1 / (1 + scheduler.sigmas[index].double() ** 2)
            inputs = kept.sqrt() * clean + (1 - kept).sqrt() * noise
            velocity = kept.sqrt() * noise - (1 - kept).sqrt() * clean
            output = {"velocity": velocity, "sample": clean}.get(kind, noise)
        # Schedulers keep their noise levels in float32, and interpolate between them in other ways.
        assert error(reads.clean(inputs, output, time), clean) <= 1e-2
        assert error(reads.clean(inputs, reads.moved(output, change, time), time), clean + change) <= 1e-2


@pytest.mark.parametrize("first", [0, 3])
def test_a_mask_finds_the_position_that_attends_to_the_text(first: int) -> None:
    query = torch.zeros(2, 1, 16 + 3, 4)
    query[:, :, first + 5, 0] = 9.0  # one position of a 4 x 4 picture looks for what the text's keys have
    key = torch.zeros(2, 1, 16 + 3, 4)
    key[:, :, 0 if first else 16 :, 0][..., :3] = 1.0
    with ObjectMask((8, 8), num_text=3, text_first=first > 0) as mask:
        torch.nn.functional.scaled_dot_product_attention(query, key, query)
    found = mask.weights(batch=1)
    assert found.shape == (1, 1, 8, 8)
    assert found.argmax().item() in (2 * 8 + 2, 2 * 8 + 3, 3 * 8 + 2, 3 * 8 + 3)
    with pytest.raises(UnsupportedError, match="mask='attention'"):
        ObjectMask((8, 8), num_text=3).weights(1)


def test_the_recipe_asks_the_pipeline_of_a_model_of_any_size() -> None:
    pipe = CASES["FluxPipeline"].make()
    with loaded("highres_image", Path(__file__).resolve().parents[2] / "recipes") as recipe:
        asked = recipe.call(recipe.Config(model="a folder", factor=2), pipe)
    assert asked["height"] == asked["width"] == 2 * pipe.default_sample_size * pipe.vae_scale_factor
