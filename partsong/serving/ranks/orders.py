"""Sends all ranks of a replica the first one's decisions, and checks that they execute them alike."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from partsong.errors import PartsongError, RankError
from partsong.parallel.ranks.collectives import agree, broadcast
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.objects import share_object
from partsong.serving.messages import DenoiseCall, JobWork, Spent

__all__ = ["Orders", "compare_ranks", "share_failures", "share_orders", "share_switch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """Says what every rank does next.

    Attributes:
        dropped: jobs to drop.
        setting: the model's setting from now on; None leaves it as it is.
        begun: jobs to begin.
        steps: jobs that make a step together.
        whole: a job that runs to its end in the pipeline's own loop; None for none.
        call: a client's call of the denoiser, in a session that has begun; None for none.
        ends: whether the ranks end.
    """

    dropped: tuple[str, ...] = ()
    setting: tuple[tuple[str, ...], str | None] | None = None
    begun: tuple[JobWork, ...] = ()
    steps: tuple[str, ...] = ()
    whole: JobWork | None = None
    call: DenoiseCall | None = None
    ends: bool = False


def share_orders(axis: Axis, orders: Orders | None) -> Orders:
    """Gives every rank the first one's orders; the others give None."""
    return share_object(axis, orders, name="orders of the first rank")


def share_switch(axis: Axis, is_on: bool) -> bool:
    """Gives every rank the first one's switch."""
    return bool(broadcast(axis, torch.tensor([is_on], dtype=torch.uint8), name="switch of the first rank").item())


def compare_ranks(axis: Axis, outcome: float, failed: int, spent: Spent) -> tuple[tuple[Spent, ...], bool]:
    """Checks that a step ended the same way on all ranks.

    Args:
        axis: all ranks.
        outcome: a number that identifies the outcome of the jobs on this rank.
        failed: how many of them ended in an error on this rank.
        spent: what this rank spent on the step.

    Returns:
        What each rank spent, and whether some rank has an error that another does not have.

    Raises:
        RankError: the outcomes differ; names the rank.
    """
    numbers = [outcome, failed, spent.bytes_sent, spent.seconds_waiting]
    table = agree(axis, numbers, name="comparison of a step's outcome")
    for place, row in enumerate(table):
        if row[0] != table[0][0]:
            rank = axis.ranks[place]
            raise RankError(f"rank {rank} ended the step differently than rank {axis.ranks[0]}", rank)
    return tuple(Spent(int(row[2]), row[3]) for row in table), len({row[1] for row in table}) > 1


def share_failures(axis: Axis, failed: Mapping[str, PartsongError]) -> dict[str, PartsongError]:
    """Gives every rank the errors of all, by the names of jobs."""
    body = pickle.dumps(dict(failed))
    longest = max(int(row[0]) for row in agree(axis, [len(body)], name="lengths of errors"))
    everything: dict[str, PartsongError] = {}
    for row in agree(axis, list(body.ljust(longest)), name="errors of all ranks"):
        everything |= pickle.loads(
            bytes(map(int, row))
        )  # pickled by our own ranks; the padding after its end is not read
    return everything
