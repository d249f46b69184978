"""Loops of partsong's own, and a server's turns, let the host wait for what their method has to know, and no more."""

from __future__ import annotations

import functools

import pytest

from partsong.parallel.ranks.launch import launch
from tests.gpu_ready import loops_worker
from tests.gpu_ready.units import Unit

pytestmark = pytest.mark.slow

#: How far the guesses hold.
HOLDS = "_local_scalar_dense partsong/samplers/denoising/fixed_point.py:_Window._distance"
#: Before the first sweep the steps are learned on random numbers, while the device has nothing else to do.
LEARNS = ("partsong/samplers/time_parallel/rehear", "partsong/samplers/time_parallel/sums", "same_arguments.py")
#: Whether a causal model's mask hides something.
HIDES = "_local_scalar_dense partsong/samplers/long_video/staged_frames.py:StagedFrames._masks"
#: Of tensors in the host's memory: the first rank's orders, and the comparison of what became of them.
ORDERS = ("numpy partsong/parallel/ranks/objects.py:_length", "numpy partsong/parallel/ranks/objects.py:_object")
OUTCOMES = "tolist partsong/parallel/ranks/collectives.py:agree"
#: A model without its pipeline tells its steps by their times.
TIMES = "_local_scalar_dense partsong/parallel/hooks/clock.py:_first"


@functools.cache
def counted() -> dict[str, list[Unit]]:
    return launch(loops_worker.units, 2, 2)


@pytest.mark.full
def test_a_sweep_over_steps_reads_how_far_its_guesses_hold() -> None:
    for rank in counted()["TimeParallel"]:
        learned = {name for name in rank.waits if any(place in name for place in LEARNS)}
        assert {name: times for name, times in rank.waits.items() if name not in learned} == {HOLDS: 1.0}
        assert (rank.late, rank.uploads, rank.messages) == ({}, {}, 1.0)


def test_a_block_of_a_queue_reads_nothing() -> None:
    for rank in counted()["DualParallel"]:
        # One for each of its steps: to the other rank, or back with the answer.
        assert rank == Unit({}, {}, {}, messages=float(loops_worker.STEPS))


def test_a_block_of_a_chain_reads_a_mask() -> None:
    for rank in counted()["TimestepPipeline"]:
        assert rank == Unit({HIDES: loops_worker.STEPS / 2}, {}, {}, messages=1.0)


def test_a_turn_of_a_server_asks_the_device_for_the_time_alone() -> None:
    """Its orders and outcomes do not touch the device."""
    for number, rank in enumerate(counted()["server"]):
        # The first rank wrote the orders itself.
        length, order = ORDERS
        orders = {length: 1.0} if number == 0 else {length: 2.0, order: 1.0}
        assert rank.waits == orders | {OUTCOMES: 1.0, TIMES: 1.0}
        assert rank.uploads == {}
        assert sum(rank.late.values()) == 1.0
