"""A paused call is the pipeline's own call: the same bits, whoever answers it and whatever runs beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchHeunDiscreteScheduler

from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped
from tests.parallel.pipelines import PIPES

STEPS = 3


def arguments(name: str, seed: int | None = 9, **more: Any) -> dict[str, Any]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    named = PIPES[name].arguments(1, torch.float32, (48, 80))
    return {**named, "num_inference_steps": STEPS, "generator": generator, **more}


def picture(output: Any) -> torch.Tensor:
    return torch.as_tensor(next(iter(output.values())))


def answer(pipe: Any, event: Any) -> Any:
    if isinstance(event, Denoise):
        with torch.no_grad():
            return pipe.transformer(**event.arguments)
    return event.latents


def drive(pipe: Any, call: PausedCall) -> list[Any]:
    events = [call.send()]
    while not isinstance(events[-1], Finished):
        events.append(call.send(answer(pipe, events[-1])))
    return events


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "partsong-paused-call"]


@pytest.mark.parametrize("name", PIPES)
def test_replays_a_plain_call_to_the_last_bit(name: str) -> None:
    pipe = PIPES[name].make(torch.float32)
    want = picture(pipe(**arguments(name)))
    before = sorted(vars(pipe)), sorted(vars(pipe.scheduler)), sorted(vars(pipe.transformer))
    with PausedCall(pipe, "transformer", arguments(name)) as call:
        events = drive(pipe, call)
    assert torch.equal(picture(events[-1].output), want)
    assert [type(event) for event in events].count(Stepped) == STEPS
    assert [type(event) for event in events].count(Denoise) == STEPS * PIPES[name].calls
    assert not threads()
    assert (sorted(vars(pipe)), sorted(vars(pipe.scheduler)), sorted(vars(pipe.transformer))) == before


def test_two_evaluations_per_step() -> None:
    pipe = PIPES["SD3"].make(torch.float32)
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    want = picture(pipe(**arguments("SD3")))
    with PausedCall(pipe, "transformer", arguments("SD3")) as call:
        events = drive(pipe, call)
    assert torch.equal(picture(events[-1].output), want)
    assert sum(isinstance(event, Stepped) for event in events) == 2 * STEPS - 1


@pytest.mark.parametrize("seed", [9, None], ids=["a generator", "the default generator"])
def test_calls_side_by_side_draw_what_each_would_draw_alone(seed: int | None) -> None:
    """With a scheduler that draws noise in every step."""
    pipe = PIPES["DiT"].make(torch.float32)
    pipe.scheduler = DDPMScheduler()

    def named() -> dict[str, Any]:
        torch.manual_seed(5)
        return arguments("DiT", seed)

    plain = named()
    want, after = picture(pipe(**plain)), torch.get_rng_state()
    given = named()
    calls = [PausedCall(pipe, "transformer", given) for _ in range(3)]
    for call in calls:
        call.send()
    while not isinstance(calls[0].event, Finished):
        torch.randn(7)  # the driver's own draws are no business of the calls
        for call in calls:
            call.send(answer(pipe, call.event))
    outputs = [call.event.output for call in calls if isinstance(call.event, Finished)]
    assert len(outputs) == 3
    assert all(torch.equal(picture(output), want) for output in outputs)
    calls[-1].hand_back_random_state()
    assert torch.equal(torch.get_rng_state(), after)
    if seed is not None:
        assert torch.equal(given["generator"].get_state(), plain["generator"].get_state())


def test_the_driver_replaces_latents() -> None:
    pipe = PIPES["SD3"].make(torch.float32)
    want = picture(pipe(**arguments("SD3")))
    with PausedCall(pipe, "transformer", arguments("SD3", output_type="latent")) as call:
        event = call.send()
        while not isinstance(event, Finished):
            event = call.send(event.latents * 0 if isinstance(event, Stepped) else answer(pipe, event))
    assert not picture(event.output).any()
    assert want.any()


def test_ends_before_decoding() -> None:
    pipe = PIPES["SD3"].make(torch.float32)
    with PausedCall(pipe, "transformer", arguments("SD3"), decodes=False) as call:
        events = drive(pipe, call)
    assert events[-1] == Finished(None)
    assert sum(isinstance(event, Stepped) for event in events) == STEPS
    assert not threads()


@pytest.mark.parametrize("answers", range(3), ids=lambda n: f"after {n} events")
def test_closing_leaves_no_thread(answers: int) -> None:
    pipe = PIPES["Flux"].make(torch.float32)
    with PausedCall(pipe, "transformer", arguments("Flux")) as call:
        if answers:
            call.send()
        for _ in range(answers - 1):
            call.send(answer(pipe, call.event))
        assert len(threads()) == min(answers, 1)
    assert not threads()
    assert isinstance(call.event, Finished)
    call.close()


def test_closing_unwinds_a_pipeline_that_catches_errors() -> None:
    seen: list[str] = []

    def stubborn(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except Exception:  # noqa: BLE001
                seen.append("caught")
                return original(*args, **kwargs)
            finally:
                seen.append("unwound")

        return step

    pipe = PIPES["SD3"].make(torch.float32)
    with PausedCall(pipe, "transformer", arguments("SD3")) as call:
        call.pipe.scheduler.step = stubborn(call.pipe.scheduler.step)
        call.send(answer(pipe, call.send()))
        assert isinstance(call.event, Stepped)
    assert seen == ["unwound"]
    assert not threads()


def test_errors_of_the_pipeline_reach_the_driver() -> None:
    pipe = PIPES["SD3"].make(torch.float32)
    with PausedCall(pipe, "transformer", arguments("SD3", height=50)) as call:
        with pytest.raises(ValueError, match="divisible"):
            call.send()
        assert not threads()


def test_errors_of_the_driver_end_the_call() -> None:
    def drive_badly() -> None:
        with PausedCall(PIPES["SD3"].make(torch.float32), "transformer", arguments("SD3")) as call:
            call.send()
            assert threads()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drive_badly()
    assert not threads()


def test_the_callers_modes_hold_inside() -> None:
    pipe = PIPES["SD3"].make(torch.float32)
    want = picture(pipe(**arguments("SD3")))
    with torch.inference_mode(), PausedCall(pipe, "transformer", arguments("SD3")) as call:
        events = drive(pipe, call)
        assert events[1].latents.is_inference()
    assert torch.equal(picture(events[-1].output), want)
