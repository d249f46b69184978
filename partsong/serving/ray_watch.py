"""Starts ranks in actors of a Ray cluster and waits for their ends. Importing this does not load Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partsong.parallel.ranks.blame import BLAMED_GRACE, GRACE, RankReport, first_cause, is_blamed
from partsong.reasoning.cluster.place import last_line
from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["LOOK", "RankSeat", "RankWatch"]

#: Seconds between two polls of the cluster.
LOOK = 0.5
#: Seconds that ranks get to end by themselves when the server closes.
_CLOSING = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSeat:
    """Says where an actor runs.

    Attributes:
        node: address of its node.
        process: number of its process.
        gpus: those of the node that Ray has assigned to it.
    """

    node: str
    process: int
    gpus: tuple[str, ...] = ()


class RankWatch:
    """Starts ranks in running actors, and waits until all have ended, or one has failed.

    Args:
        actors: in the order of ranks.
        seats: where they run.
        closing: is set when the server closes.
    """

    def __init__(self, actors: Sequence[Any], seats: Sequence[RankSeat], closing: threading.Event) -> None:
        self._actors, self._seats, self._closing = actors, seats, closing
        self._reports: dict[int, RankReport] = {}
        self._died: dict[int, str] = {}

    def run(self, settings: ReplicaSettings) -> None:
        """Runs them.

        Raises:
            PartsongError: what ended them.
        """
        import ray
        from torch.distributed import TCPStore

        # It lives in this process, and so outlives any rank. Port 0 lets the system choose.
        address = ray.util.get_node_ip_address()
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        environments = _environments(self._seats, address, store.port)
        runs = zip(self._actors, environments, strict=True)
        waiting = {actor.run.remote(settings, each): rank for rank, (actor, each) in enumerate(runs)}
        deadline = None
        while waiting and (deadline is None or time.monotonic() < deadline):
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=LOOK)
            for reference in done:
                self._collect(waiting.pop(reference), reference)
            failed = self._failed
            if deadline is None and (failed or self._closing.is_set()):
                grace = _CLOSING if self._closing.is_set() else BLAMED_GRACE if is_blamed(store) else GRACE
                deadline = time.monotonic() + grace
        if self._failed and not self._closing.is_set():
            raise first_cause(self._failed, self._reports, store, self._how)

    @property
    def _failed(self) -> list[int]:
        raised = [rank for rank, report in self._reports.items() if report.error is not None]
        return sorted([*raised, *self._died])

    def _collect(self, rank: int, reference: Any) -> None:
        import ray

        try:
            self._reports[rank] = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._died[rank] = last_line(error)

    def _how(self, rank: int) -> str:
        seat = self._seats[rank]
        return f"(process {seat.process} on {seat.node}) is gone: {self._died[rank]}"


def _environments(seats: Sequence[RankSeat], address: str, port: int) -> list[dict[str, str]]:
    """Returns the environment variables by which each rank finds the others, as torchrun sets them."""
    by_node: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        by_node.setdefault(seat.node, []).append(rank)
    environments = []
    for rank, seat in enumerate(seats):
        here = by_node[seat.node]
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(here.index(rank)),
            "WORLD_SIZE": str(len(seats)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if seat.gpus:
            # NCCL reaches a neighbour's memory only where both see both.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for other in here for gpu in seats[other].gpus)
        environments.append(environment)
    return environments
