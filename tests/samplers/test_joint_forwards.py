"""Forwards in lockstep: each gets the keys that it sees, one runs at a time, and an error leaves no thread behind."""

from __future__ import annotations

import contextvars
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partsong.parallel.ranks.mesh import Axis
from partsong.samplers.cascade_pipeline.clean_keys import CleanKeys
from partsong.samplers.cascade_pipeline.joint_forwards import JointForwards
from partsong.samplers.cascade_pipeline.slots import Cascade
from partsong.samplers.pipeline.paused_thread import PausedThread

CPU = torch.device("cpu")


class Stage:
    """Stands in for a model of two attentions, whose hooks count the forwards' steps in one place."""

    adapter = SimpleNamespace(model="Stage")

    def __init__(self) -> None:
        self.layers = ["first", "second"]
        self.reached = 0

    def state(self) -> dict[str, Any]:
        return {"reached": self.reached}

    def resume(self, state: dict[str, Any]) -> None:
        self.reached = state["reached"]


def joint(window: int = 2, sink: int = 1) -> tuple[JointForwards, Stage]:
    stage: Any = Stage()
    return JointForwards(Axis("alone", (0,), 0), stage, CleanKeys(2, window, sink), CPU), stage


def keys(block: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of a block of two frames with a token each, which tell block, layer and frame."""
    values = torch.tensor([100.0 * block + 10 * layer, 100.0 * block + 10 * layer + 1])[None, None, :, None]
    return values, -values


def forwards(found: JointForwards, stage: Stage, blocks: list[int], log: list[Any]) -> dict[int, Any]:
    def forward(block: int) -> str:
        stage.reached = 0
        for layer in range(2):
            around = found.around(layer, *keys(block, layer))
            stage.reached += 1
            log.append((block, layer, [(int(k[0, 0, 0, 0]), frames) for k, _, frames in around]))
        assert stage.reached == 2, "another forward has counted here"
        return f"done {block}"

    return {block: (lambda block=block: forward(block)) for block in blocks}


def test_each_sees_who_is_in_flight_and_what_is_clean() -> None:
    found, stage = joint(window=1)
    cascade, log = Cascade(blocks=4, steps=2, depth=2, ranks=1), []
    for number in range(cascade.slots):
        slot = cascade.slot(number)
        outputs = found.run(slot, 0, forwards(found, stage, list(slot.steps), log))
        assert outputs == {block: f"done {block}" for block in slot.steps}
    seen = {(block, layer): [] for block, layer, _ in log}
    for block, layer, around in log:
        seen[block, layer].append(around)
    # A step beside nobody or the block before, one beside the clean call of it, and the clean call.
    assert seen[0, 1] == [[], [(110, 2)], []]
    assert seen[1, 0] == [[(0, -2)], [(0, -2), (200, 2)], [(0, -2)]]
    # Block 0 has left the window: its first frame lies before what is seen.
    assert seen[2, 0] == [[(0, -3), (100, -2)], [(0, -3), (100, -2), (300, 2)], [(0, -3), (100, -2)]]
    assert seen[3, 1] == [[(10, -3), (210, -2)], [(10, -3), (210, -2)]]
    assert found.forward_bytes == 2 * 2 * 2 * 4


def test_memory_does_not_grow() -> None:
    peaks = []
    for blocks in (4, 9):
        found, stage = joint()
        cascade = Cascade(blocks=blocks, steps=3, depth=3, ranks=1)
        for number in range(cascade.slots):
            slot = cascade.slot(number)
            found.run(slot, 0, forwards(found, stage, list(slot.steps), []))
        peaks.append(found.keys.peak_bytes)
    # Two attentions with the window and the sink each, and the newest block of one of them.
    assert peaks == [2 * (2 * 16 + 8) + 16] * 2


def test_an_error_travels_and_ends_every_forward() -> None:
    found, stage = joint()
    slot = Cascade(blocks=2, steps=2, depth=2, ranks=1).slot(1)
    calls = forwards(found, stage, [0], [])

    def fails() -> None:
        found.around(0, *keys(1, 0))
        raise ZeroDivisionError("in the second attention")

    with pytest.raises(ZeroDivisionError, match="in the second attention"):
        found.run(slot, 0, calls | {1: fails})
    assert not [thread for thread in threading.enumerate() if thread.name == "partsong-forward"]


def test_a_call_with_other_attentions_is_refused() -> None:
    found, stage = joint()
    slot = Cascade(blocks=1, steps=1, depth=1, ranks=1).slot(0)
    stage.layers.append("third")
    with pytest.raises(ValueError, match="a call made 2 attentions, and the model has 3"):
        found.run(slot, 0, forwards(found, stage, [0], []))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_every_step_once_in_order_and_nobody_too_many(steps: int) -> None:
    for depth in range(1, steps + 1):
        for blocks in (1, 2, 7):
            cascade = Cascade(blocks=blocks, steps=steps, depth=depth, ranks=min(3, blocks))
            made: dict[int, list[int]] = {}
            for number in range(cascade.slots):
                slot = cascade.slot(number)
                assert sum(step < steps for step in slot.steps.values()) <= depth
                assert 0 < len(slot.steps) <= cascade.most
                for block, step in slot.steps.items():
                    made.setdefault(block, []).append(step)
                if slot.clean is not None and blocks - slot.clean > cascade.most:  # later blocks will read it
                    assert len(slot.steps) == cascade.most
            calls = [list(range(steps + (block < blocks - 1))) for block in range(blocks)]
            assert [made[block] for block in range(blocks)] == calls


def test_a_thread_has_the_modes_and_the_variables_of_its_caller() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    def look() -> tuple[bool, bool, int]:
        return torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), variable.get()

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert PausedThread(look, CPU, "test").send().value == (True, True, 7)
    with torch.no_grad():
        assert PausedThread(torch.is_grad_enabled, CPU, "test").send().value is False


def test_a_thread_that_is_closed_unwinds() -> None:
    ended: list[str] = []

    def work() -> None:
        try:
            thread.pause("first")
        finally:
            ended.append("unwound")

    thread = PausedThread(work, CPU, "test")
    assert thread.send() == "first"
    thread.close()
    thread.close()
    assert ended == ["unwound"]
