"""LatentParallel: parts by definition, the same bits on any number of ranks, and bytes as predicted."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong import LatentParallel, Ulysses
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import parallelize, predict
from partsong.parallel.adapters import adapter_for
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.latent_parallel.layout import PartRules
from partsong.parallel.ranks.agreement import NUMBERS_PER_VALUE
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import latent_worker as worker
from tests.parallel.families import FAMILIES, adapter_of
from tests.parallel.ranks import error
from tests.parallel.real_sizes_unets import SDXL
from tests.parallel.test_real_sizes import SIZES
from tests.parallel.unets import UNETS

#: Families that compute norms, positions or experts in single precision, whatever the type of their weights.
SINGLE = 1e-6

RANKS = (1, 2, pytest.param(3, marks=pytest.mark.full))


@torch.no_grad()
def parts_of(name: str, strategy: LatentParallel) -> tuple[list[Tensor], list[Tensor]]:
    """What one rank predicts in every step under a strategy, and without one."""
    model, calls = worker.calls_of(name)
    plain = [sample_of(model(**call)) for call in calls]
    with parallelize(model, strategy):
        return [sample_of(model(**call)) for call in calls], plain


#: With and without tokens of the rest, in turn.
WITH_CONTEXT = [(name, (2, None, 3)[turn % 3]) for turn, name in enumerate(worker.NAMES)]
#: Those that run by default: one family of four, each of these ways in turn.
USUAL = WITH_CONTEXT if covering.FULL else WITH_CONTEXT[::4]


@pytest.mark.parametrize(("name", "context"), USUAL)
def test_a_part_is_the_model_that_sees_only_its_tokens(name: str, context: int | None) -> None:
    got, plain = parts_of(name, LatentParallel(parts=2, context=context))
    model, calls = worker.calls_of(name)
    for step in range(3):
        call = calls[step]
        want = worker.defined(model, adapter_of(name), call, worker.sizes_of(name, call), step, context)
        assert error(got[step], want) <= SINGLE, step
        assert error(got[step], plain[step]) > 1e-5, step


#: UNets that are run on parts; by default one of four.
UNETS_HERE = [name for name in UNETS if name != "Kandinsky"][:: 1 if covering.FULL else 4]
#: Models that only pipelines make here, the sizes of their tokens in the first call, and how exact these are.
_ALL = ("Kandinsky5T2VPipeline", "MotifVideoPipeline", "MotifVideoPipeline + cross-attention")
IN_PIPELINES = _ALL if covering.FULL else _ALL[:1]


@pytest.mark.parametrize("name", IN_PIPELINES)
def test_a_part_in_a_pipeline_is_the_model_that_sees_only_its_tokens(name: str) -> None:
    model, calls = worker.calls_in(name, LatentParallel(parts=2))
    for named, got in calls[:1]:
        at = (1, 2, 3) if name.startswith("Kandinsky") else (2, 3, 4)
        sizes = [named["hidden_states"].shape[dim] // patch for dim, patch in zip(at, (1, 2, 2), strict=True)]
        want = worker.defined(model, adapter_for(model), named, tuple(sizes), 0, 4)
        assert error(got, want) <= SINGLE


@pytest.mark.parametrize(("name", "module", "size"), [("SD3", "pos_embed", (1, 5, 6)), ("Wan", "rope", (3, 5, 5))])
@torch.no_grad()
def test_a_part_is_the_stock_model_on_a_smaller_latent_with_its_true_positions(
    name: str, module: str, size: tuple[int, int, int]
) -> None:
    """Cut, run, blend: positions are those that the model computes for the whole latent."""
    model, calls = worker.calls_of(name)
    got, _ = parts_of(name, LatentParallel(parts=3, overlap=0.5, context=None))
    cuttable = [dim for dim in range(3) if size[dim] >= 3]
    for step, call in enumerate(calls):
        dim = cuttable[step % len(cuttable)]
        bounds = worker.part_bounds(size[dim], 3, 0.5)
        at = dim + 2 if name == "Wan" else dim + 1
        unit = 1 if dim == 0 else 2

        def run(dim: int, start: int, end: int) -> Tensor:
            whole = getattr(model, module)(call["hidden_states"])  # noqa: B023 - called at once
            tokens = torch.arange(size[0] * size[1] * size[2]).view(size).narrow(dim, start, end - start).flatten()
            there = whole[:, tokens] if isinstance(whole, Tensor) else tuple(part[:, tokens] for part in whole)
            part = call["hidden_states"].narrow(at, start * unit, (end - start) * unit)  # noqa: B023
            with worker.in_place(getattr(model, module), lambda output: there):
                return sample_of(model(**{**call, "hidden_states": part}))  # noqa: B023

        assert error(got[step], worker.blended(run, dim, bounds, at, unit)) <= 1e-10, step


@pytest.mark.parametrize("name", UNETS_HERE)
@torch.no_grad()
def test_a_part_of_a_picture_is_a_picture_to_a_unet(name: str) -> None:
    model, calls = worker.calls_of(name)
    got, _ = parts_of(name, LatentParallel(parts=2))
    for step, call in enumerate(calls[:2]):
        assert error(got[step], unet_by_parts(model, call, step)) <= 1e-12


@pytest.mark.parametrize(
    "name", ["DDIMPipeline", "DreamLitePipeline", "AudioLDM2Pipeline"][: 3 if covering.FULL else 1]
)
@torch.no_grad()
def test_a_part_in_a_pipeline_is_a_picture_to_a_unet(name: str) -> None:
    model, calls = worker.calls_in(name, LatentParallel(parts=2))
    assert error(calls[0][1], unet_by_parts(model, calls[0][0], 0)) <= 1e-9


def unet_by_parts(model: Any, call: dict[str, Any], step: int) -> Tensor:
    """What a UNet predicts for two parts, each a picture of its own: first rows, then columns."""
    unit, at = 2 ** (len(model.config["block_out_channels"]) - 1), -2 + step
    length = call["sample"].shape[at] // unit

    def run(dim: int, start: int, end: int) -> Tensor:
        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            each = value.shape[at] // length
            return value.narrow(at, start * each, (end - start) * each)

        spread = [key for key in call if key == "sample" or "residual" in key]
        return sample_of(model(**{**call, **{key: cut(call[key]) for key in spread}}))

    return worker.blended(run, step, worker.part_bounds(length, 2, 0.25), at, unit)


@functools.cache
def on_ranks(nproc: int) -> dict[str, list[dict[str, Any]]]:
    return launch(worker.on_ranks, nproc, nproc)


@pytest.mark.parametrize("nproc", RANKS[1:])
def test_any_number_of_ranks_returns_the_same_bits(nproc: int) -> None:
    for case, (alone,) in on_ranks(1).items():
        rows = on_ranks(nproc)[case]
        assert len(rows) == nproc
        for row in rows:
            assert all(map(torch.equal, row["outputs"], alone["outputs"])), case


@pytest.mark.parametrize("nproc", RANKS)
def test_bytes_counted_are_those_predicted(nproc: int) -> None:
    for case, rows in on_ranks(nproc).items():
        assert [row["counted"] for row in rows] == [row["predicted"] for row in rows], case
        assert "3 parts" in rows[0]["text"] or nproc == 1


def test_a_rank_sends_its_parts_of_the_prediction_and_no_more() -> None:
    """Five rows and six columns of patches: of three parts of two or three of them, a rank of three has one."""
    rows = on_ranks(3)["SD3, torch.float64"]
    nbytes = rows[0]["outputs"][0].nbytes
    parts = sum(2 * (nbytes * part // whole) for part, whole in ((2, 5), (3, 6), (2, 5), (3, 6)))
    # Ranks compare all arguments in the first two steps, and the latents in the others.
    compared = 2 * NUMBERS_PER_VALUE * 8 * (2 * len(adapter_of("SD3").compared) + 2)
    assert [row["counted"] for row in rows] == [parts + compared] * 3


@pytest.mark.parametrize("strategy", [LatentParallel(parts=3, overlap=1.0), LatentParallel(parts=3, warmup_steps=4)])
@pytest.mark.parametrize("name", ["SD3", "Wan", "Flux", "SD"])
def test_overlap_over_everything_or_warm_up_to_the_end_is_exact(name: str, strategy: LatentParallel) -> None:
    got, plain = parts_of(name, strategy)
    assert all(error(one, other) <= 1e-10 for one, other in zip(got, plain, strict=True))


def test_a_warm_up_is_followed_by_parts() -> None:
    got, plain = parts_of("SD3", LatentParallel(parts=2, warmup_steps=2))
    without, _ = parts_of("SD3", LatentParallel(parts=2))
    assert all(map(torch.equal, got[:2], plain[:2]))
    assert all(map(torch.equal, got[2:], without[2:]))


@functools.cache
def beside_others(nproc: int) -> dict[str, list[dict[str, Any]]]:
    return launch(worker.beside_others, nproc, nproc)


@pytest.mark.parametrize("other", ["CfgParallel", "DataParallel"])
def test_branches_and_samples_are_shared_out_beside_it(other: str) -> None:
    (alone,) = beside_others(1)[other]
    for row in beside_others(4)[other]:
        assert all(error(*pair) <= 1e-12 for pair in zip(row["outputs"], alone["outputs"], strict=True))
        assert row["counted"] == row["predicted"]


@functools.cache
def two_denoisers(nproc: int) -> list[dict[str, Any]]:
    return launch(worker.two_denoisers, nproc, nproc)


def test_a_pipeline_of_two_transformers_makes_the_same_film() -> None:
    (alone,) = two_denoisers(1)
    assert min(alone["calls"]) > 1
    for row in two_denoisers(2):
        assert torch.equal(row["film"], alone["film"])
        assert row["counted"] == row["predicted"] > 0


REFUSED = {
    "beside Ulysses": "does not compose with Ulysses",
    "beside StepCache": "does not compose with StepCache",
    "fewer parts than ranks": "parts=1 for 2 ranks would leave some without work; use parts=2 or more",
    "too many parts": "5 rows and 5 columns of patches cannot be cut into 6 parts; use at most 5 ranks and parts",
    "no frames": "1 frames of patches cannot be cut into 2 parts",
    "other tokens": "there are others among them, such as pictures to go by",
    "other order": "tokens do not come row after row",
    "odd sides": "neither side of a latent of 13 x 13 is a multiple of 4",
    "masks over the picture": "ip_adapter_masks was given",
    "beside a cache": "counts on steps that come one after the other, whole, which LatentParallel changes",
    "Sana": "its convolutions look at neighbours",
    "video, too many": "3 frames and 5 rows and 5 columns of patches cannot be cut into 9 parts; use at most 5",
}


@functools.cache
def refusals() -> dict[str, list[str]]:
    return launch(worker.refusals, 2, 2)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_on_all_ranks_alike(case: str) -> None:
    first, second = refusals()[case]
    assert first == second
    assert REFUSED[case] in first


def test_several_parts_on_one_rank_are_refused_what_ranks_are() -> None:
    model, _ = worker.calls_of("Wan")
    with pytest.raises(UnsupportedError, match="which LatentParallel changes"):
        worker.beside_cache(model, LatentParallel(parts=2))
    with pytest.raises(UnsupportedError, match="its convolutions look at neighbours"):
        parallelize(FAMILIES["Sana"].build(8), LatentParallel(parts=2))


def test_knobs_that_do_not_fit() -> None:
    with pytest.raises(ArgumentError, match="parts=2 for 3 ranks"):
        LatentParallel(degree=3, parts=2).validate()
    with pytest.raises(ArgumentError, match="overlap=1.5"):
        LatentParallel(overlap=1.5).validate()
    with pytest.raises(ArgumentError, match="dims='depth'"):
        LatentParallel(dims="depth").validate()  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.6])
@pytest.mark.parametrize("length", [5, 6, 7, 21, 64])
def test_parts_cover_the_latent_and_overlap(length: int, overlap: float, parts: int) -> None:
    rules = PartRules(parts=parts, overlap=overlap, dims=(1,), warmup_steps=0)
    for cut in rules.cuts("a model", (1, length, 1)):
        bounds = worker.part_bounds(length, parts, overlap)
        assert [(start, start + cut.part) for start in cut.starts] == bounds
        assert bounds[0][0] == 0
        assert bounds[-1][1] == length
        assert all(after[0] <= before[1] for before, after in itertools.pairwise(bounds))


@pytest.mark.parametrize("model", ["SDXL", "Wan"])
def test_four_ranks_send_three_percent_of_what_ulysses_sends(model: str) -> None:
    """Published sizes, by shapes alone."""
    size = SDXL if model == "SDXL" else SIZES["WanTransformer3DModel"]
    module = size.build()
    sent = {
        type(strategy): max(max(step) for step in predict(module, strategy, ranks=4, **size.inputs(2)).bytes_by_step)
        for strategy in (LatentParallel(), Ulysses())
    }
    assert 0 < sent[LatentParallel] <= 0.03 * sent[Ulysses]
