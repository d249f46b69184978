"""All ranks take one library for their messages, and each says why it is not the devices' own."""

from __future__ import annotations

import pytest

from partsong.errors import ArgumentError
from partsong.parallel.ranks.backend import Seat, choose

GPU = [Seat("cuda", f"GPU-{n}", "nccl") for n in range(4)]
CPU, NO_NCCL, ARC = Seat("cpu", "", "gloo"), Seat("cuda", "GPU-9"), Seat("xpu", "node/xpu:0", "xccl")


@pytest.mark.parametrize(
    ("seats", "chosen"),
    [
        ([CPU, CPU], ("gloo", "")),
        (GPU, ("nccl", "")),
        ([GPU[0], GPU[1], GPU[0]], ("gloo", "ranks 0 and 2 share one cuda device")),
        ([GPU[0], NO_NCCL], ("gloo", "torch has no library for messages between cuda devices on rank 1")),
        ([ARC, Seat("xpu", "other/xpu:0", "xccl")], ("xccl", "")),
    ],
    ids=["processors", "GPUs", "shared", "without NCCL", "Intel"],
)
def test_ranks_take_one_library(seats: list[Seat], chosen: tuple[str, str]) -> None:
    assert choose(seats) == chosen


def test_devices_of_two_types_are_refused_with_the_rank() -> None:
    with pytest.raises(ArgumentError, match="rank 2 computes on cpu, rank 0 on cuda"):
        choose([GPU[0], GPU[1], CPU])
