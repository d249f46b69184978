"""What the planner recommends: never slower than one device, nothing that does not fit, and clear refusals."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from partsong import CfgParallel, DraftedSteps, OffloadWeights, PatchPipeline, Ring, SyncPatch, Ulysses
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import mesh_for
from partsong.planner import advise, advise_number, machine_named, recommend, subject_named, subject_of
from partsong.planner.calls import Size
from partsong.planner.clock import clock_steps
from partsong.planner.mixes import mixes_for
from partsong.planner.steps import Tracer

SMALL = {"height": 512, "width": 512}


def test_a_few_cards_that_cannot_hold_the_model_share_its_weights() -> None:
    rows = recommend("flux-dev", devices="4x4090", link="pcie4", **SMALL)
    assert rows[0].kind == "exact"
    assert {type(strategy).__name__ for strategy in rows[0].strategies} & {"TensorParallel", "ShardedWeights"}
    assert all(row.memory <= 24e9 for row in rows)
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert all(row.seconds_low < row.seconds < row.seconds_high for row in rows)


def test_weights_wait_in_the_host_where_nothing_else_fits() -> None:
    subject, machine = subject_named("flux-dev"), machine_named("1x3090", "pcie4")
    advice = advise(subject, machine, **SMALL)
    assert [type(strategy) for strategy in advice.choice.strategies] == [OffloadWeights]
    assert "GB of weights are in the host's memory" in advice.sentence
    share = advice.choice.strategies[0].resident
    more = [OffloadWeights(resident=share), OffloadWeights(resident=share + 0.05)]
    rows = advise(
        subject, replace(machine, device=replace(machine.device, memory=1e12)), **SMALL, only=[[m] for m in more]
    )
    fitting, beyond = sorted(row.memory for row in rows.rows if row.strategies)
    assert fitting == advice.choice.memory <= 0.92 * 24e9 < beyond
    # Two cards hold it between them, and their hosts need not.
    assert not any(
        strategy.offloads for strategy in advise(subject, machine_named("2x3090", "pcie4"), **SMALL).choice.strategies
    )


def test_several_processes_come_to_the_same_plan() -> None:
    asked = subject_named("pixart-sigma"), machine_named("2xh100", "pcie4")
    assert advise(*asked, **SMALL, processes=2) == advise(*asked, **SMALL)


def test_devices_that_would_not_make_it_faster_stay_idle() -> None:
    subject, machine = subject_named("sdxl"), machine_named("4xh100", "nvlink")
    by_number = {number: advise(subject, machine_named(f"{number}xh100", "nvlink")) for number in (2, 4)}
    assert by_number[2].choice.seconds * 1.1 < by_number[4].choice.seconds  # else another model has to be tried
    advice = advise_number(subject, machine)
    assert (advice.machine.ranks, advice.idle, advice.rows) == (2, 2, by_number[2].rows)
    assert "The other 2 devices would not make it faster" in advice.sentence


def test_all_devices_are_taken_where_they_are_faster() -> None:
    subject, machine = subject_named("flux-dev"), machine_named("4xh100", "nvlink")
    advice = advise_number(subject, machine)
    assert (advice.machine, advice.idle) == (machine, 0)
    assert "would not make it faster" not in advice.sentence


@pytest.mark.parametrize("link", ["nvlink", "1gbit"])
def test_the_first_is_never_slower_than_one_device(link: str) -> None:
    advice = advise(subject_named("pixart-sigma"), machine_named("2xh100", link))
    assert advice.rows[0].seconds <= advice.serial.seconds
    assert any(not row.strategies for row in advice.rows)
    if link == "nvlink":
        assert isinstance(advice.choice.strategies[0], CfgParallel)
        assert "as fast as one device" in advice.sentence


def test_one_device_is_chosen_where_a_link_eats_the_gain() -> None:
    only = [(Ulysses(),), (Ring(),), (SyncPatch(),)]
    advice = advise(subject_named("flux-dev"), machine_named("2xh100", "1gbit"), only=only)
    assert advice.choice.strategies == ()
    assert "One device is as fast" in advice.sentence


def test_drift_is_allowed_in_so_many_words() -> None:
    subject, machine = subject_named("pixart-sigma"), machine_named("2xl20", "pcie4")
    exact = advise(subject, machine)
    loose = advise(subject, machine, max_drift=0.05)
    assert {row.kind for row in exact.rows} == {"exact"}
    assert "approximate" in {row.kind for row in loose.rows}
    assert all(row.drift <= 0.05 for row in loose.rows)
    assert all((row.drift > 0) == (row.drift_file is not None) for row in loose.rows)
    assert loose.rows[0].seconds <= exact.rows[0].seconds


def test_mixes_name_meshes_that_multiply_to_the_ranks() -> None:
    for name, ranks in (("flux-dev", 8), ("wan-14b", 4), ("sdxl", 6)):
        mixes = list(mixes_for(subject_named(name), ranks, 2, exact=False))
        assert len(mixes) == len(set(mixes))
        for mix in mixes:
            # Some are refused for what they are, none for its degrees: that is an ArgumentError.
            with contextlib.suppress(UnsupportedError):
                mesh_for(mix, ranks)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"devices": "4x9090"}, "known ones are h200"),
        ({"devices": "four"}, "known ones are h200"),
        ({"devices": "0xh100"}, "as in 4x4090"),
        ({"link": "string"}, "known ones are nvlink"),
        ({"height": 1001}, "nearest is 1008"),
        ({"frames": 5}, "makes pictures"),
        ({"devices": "1x3090", "memory": 8e9}, "does not fit.*with offload-weights, and"),
        ({"memory": -1}, "give the bytes"),
        ({"per_node": 3, "across": "10gbit"}, "do not fill nodes of 3"),
        ({"across": "10gbit"}, "devices of a node"),
    ],
)
def test_requests_that_cannot_be_planned(asked: dict[str, object], message: str) -> None:
    given = {"devices": "2xh100", "link": "nvlink", **asked}
    with pytest.raises(ArgumentError, match=message):
        recommend("flux-dev", **given)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="flux-dev"):
        recommend("flux", devices="2xh100")


def test_videos_have_so_many_frames() -> None:
    with pytest.raises(ArgumentError, match="the nearest is 81"):
        recommend("wan-1.3b", devices="2xh100", frames=80)


def test_a_pipeline_is_asked_for_its_own_calls() -> None:
    """A call that is begun and broken off shows the arguments that a real one has."""
    from partsong import zoo

    pipe = zoo.load("shapes")
    subject = subject_of(pipe)
    assert (subject.branches, subject.joined) == (2, True)
    seen: dict[str, object] = {}
    hook = pipe.transformer.register_forward_pre_hook(lambda part, args, named: seen.update(named), with_kwargs=True)
    pipe(prompt="a red circle", num_inference_steps=1, height=subject.height, width=subject.width, output_type="latent")
    hook.remove()
    given = subject.call(Size(height=subject.height, width=subject.width, batch=2, dtype=subject.dtype))
    tensors = {name: value.shape for name, value in seen.items() if isinstance(value, torch.Tensor)}
    assert {name: value.shape for name, value in given.items() if isinstance(value, torch.Tensor)} == tensors
    rows = advise(subject, machine_named("2xh100", "nvlink"), only=[(CfgParallel(),), (Ulysses(),)]).rows
    assert {row.strategy for row in rows} == {"cfg-parallel", "ulysses", "serial"}


def test_guidance_in_two_calls_is_shared_out() -> None:
    tracer = Tracer(subject_named("qwen-image"), Size(height=512, width=512))
    one, two = tracer.trace([], 1, 10), tracer.trace([CfgParallel()], 2, 10)
    alone = clock_steps(one, machine_named("1xh100", "nvlink")).seconds
    assert clock_steps(two, machine_named("2xh100", "nvlink")).seconds == pytest.approx(alone / 2, rel=0.02)
    assert two.bytes_sent == 10 * 32 * 32 * 64 * 2  # the prediction of a branch, in half precision


def test_rounds_of_a_window_take_a_call_each() -> None:
    """Twenty steps, two at a time: ten calls on each rank, and an exchange of latents in every round."""
    tracer = Tracer(subject_named("flux-dev"), Size(height=512, width=512))
    machine = machine_named("2xh100", "pcie4")
    one = clock_steps(tracer.trace([], 1, 20), machine_named("1xh100", "pcie4")).seconds
    two = tracer.trace([DraftedSteps(degree=2, depth=2)], 2, 20)
    latents = 32 * 32 * 64 * 2
    assert two.bytes_sent == 10 * latents
    exchanges = 10 * (machine.link.post + machine.link.latency + latents / machine.link.bandwidth)
    assert clock_steps(two, machine).seconds == pytest.approx(one / 2 + exchanges, rel=1e-6)


def test_a_pipeline_of_patches_fills_and_then_keeps_every_stage_at_work() -> None:
    """Written out: a warm-up step through all stages, then patches one stage apart, and the fill once."""
    subject, size = subject_named("flux-dev"), Size(height=1024, width=1024)
    tracer = Tracer(subject, size)
    serial, piped = tracer.trace([], 1, 20), tracer.trace([PatchPipeline(degree=4, num_patches=8)], 4, 20)
    alone = clock_steps(serial, machine_named("1xl20", "nvlink")).seconds
    # Patches compute as much as the whole picture or, being small, a little less well.
    ideal = (alone / 20) * (1 + 19 / 4 + 3 / (4 * 8))
    assert ideal * 0.98 <= clock_steps(piped, machine_named("4xl20", "nvlink")).seconds <= ideal * 1.6
    assert piped.weights == pytest.approx(serial.weights / 4, rel=0.15)
    assert piped.bytes_sent == 20 * (1024 * 4 + 512) * 3072 * 2  # what a block hands on, once a step


@pytest.mark.parametrize("model", ["flux-dev", "qwen-image"])
def test_text_encoders_and_decoder_are_part_of_it(model: str) -> None:
    subject, machine = subject_named(model), machine_named("1xh200", "nvlink")
    row = advise(subject, machine).rows[0]
    assert row.seconds == pytest.approx(row.encoding + row.denoising + row.decoding)
    assert min(row.encoding, row.decoding) > 0
    weights = sum(weight.nbytes for weight in subject.denoiser.parameters())
    assert row.memory > weights + 2 * sum(encoder.parameters for encoder in subject.encoders)
