"""Runs the ranks of a replica as actors on a Ray cluster. Importing this does not load Ray."""

from __future__ import annotations

import logging
import os
import socket
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from partsong.errors import ArgumentError, DistributedError
from partsong.parallel.ranks.blame import RankReport
from partsong.parallel.ranks.launch import portable
from partsong.reasoning.cluster.joining import import_ray, join_cluster
from partsong.reasoning.cluster.place import last_line
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.ray_watch import LOOK, RankSeat, RankWatch
from partsong.serving.runners import RankRunner

__all__ = ["ray_runner"]

_log = logging.getLogger(__name__)


def ray_runner(address: str | None, *, ranks: int, threads: int | None) -> RankRunner:
    """Connects this process to a Ray cluster and returns a runner of ranks there.

    Args:
        address: as for `join_cluster`.
        ranks: of all models and replicas.
        threads: of each.

    Raises:
        ArgumentError: no cluster is there, or one that was started here, which does not grow, is too small.
        UnsupportedError: Ray is not installed.
    """
    is_own = join_cluster(address)
    ray = import_ray()
    has = ray.cluster_resources()
    kind, each = ("GPU", 1) if has.get("GPU", 0.0) else ("CPU", threads or 1)
    if is_own and ranks * each > has.get(kind, 0.0):
        ray.shutdown()
        raise ArgumentError(
            f"{ranks} ranks need {ranks * each} {kind}s of a Ray cluster, and this machine has {has.get(kind, 0.0):g}: "
            "use fewer (--nproc, --replicas, --threads), or name a cluster of several machines with --ray-address"
        )
    return RankRunner(run=_run_ranks, host=ray.util.get_node_ip_address())


class _RankActor:
    """Runs one rank, in a process of its own on some node."""

    def seat(self) -> RankSeat:
        """Says where this actor runs."""
        import ray

        gpus = tuple(map(str, ray.get_gpu_ids()))
        return RankSeat(node=ray.util.get_node_ip_address(), process=os.getpid(), gpus=gpus)

    def run(self, settings: ReplicaSettings, environment: dict[str, str]) -> RankReport:
        """Serves until the server asks the ranks to end; returns what this rank raised, if anything."""
        import ray

        if (interface := _interface(ray.util.get_node_ip_address())) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.update(environment)  # torch reads it while it is imported
        try:
            from partsong import zoo
            from partsong.serving.ranks.loop import serve_ranks

            if settings.zoo_name is not None:  # partsong may be installed elsewhere here
                settings = replace(settings, folder=zoo.MODELS[settings.zoo_name].pipeline_folder)
            serve_ranks(settings)
            return RankReport()
        except BaseException as error:  # noqa: BLE001 - the server must learn of any error that ends this rank
            return RankReport(error=portable(error), trace=traceback.format_exc())


def _run_ranks(settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
    """Runs ranks as actors, each in a bundle of one placement group, until all of them have ended or one has failed.

    While the cluster has no room the placement group waits, so a replica starts when a node joins.

    Raises:
        PartsongError: the ranks ended unasked.
    """
    ray = import_ray()
    try:
        group = ray.util.placement_group(_bundles(ray, settings, nproc), strategy="PACK")
        actors: list[Any] = []
        try:
            if not _has_room(group, closing):
                return
            actors = _actors(ray, group, nproc)
            if (seats := _seats(ray, actors, closing)) is None:
                return
            # Neighbours talk most, so ranks of one node are numbered one after the other.
            order = sorted(range(nproc), key=lambda number: (seats[number].node, number))
            RankWatch([actors[number] for number in order], [seats[number] for number in order], closing).run(settings)
        finally:
            for actor in actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group)
    except ray.exceptions.RayError as error:
        raise DistributedError(f"the ranks could not be run on the Ray cluster: {last_line(error)}") from error


def _has_room(group: Any, closing: threading.Event) -> bool:
    """Waits until the cluster has room for a placement group; returns False if the server closes first."""
    has_told = False
    while not group.wait(LOOK):
        if closing.is_set():
            return False
        if not has_told:
            _log.warning("ranks wait for room on the Ray cluster: %s", group.bundle_specs)
            has_told = True
    return True


def _seats(ray: Any, actors: Sequence[Any], closing: threading.Event) -> list[RankSeat] | None:
    """Waits until all actors run and returns where; None when the server closes first."""
    asked = [actor.seat.remote() for actor in actors]
    while not closing.is_set():
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK)
        if len(done) == len(asked):
            return ray.get(asked)
    return None


def _bundles(ray: Any, settings: ReplicaSettings, nproc: int) -> list[dict[str, float]]:
    """Returns what each rank needs: a GPU where the cluster has GPUs, and cores for its threads elsewhere."""
    if ray.cluster_resources().get("GPU", 0.0):
        return [{"GPU": 1.0}] * nproc
    return [{"CPU": float(settings.threads or 1)}] * nproc


def _actors(ray: Any, group: Any, nproc: int) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = group.bundle_specs[0]
    return [
        ray.remote(_RankActor)
        .options(
            num_cpus=needs.get("CPU", 0.0),
            num_gpus=needs.get("GPU", 0.0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        .remote()
        for number in range(nproc)
    ]


def _interface(address: str) -> str | None:
    """Returns the network interface with the address at which other nodes reach this one; None if there is none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family in (socket.AF_INET, socket.AF_INET6) and each.address == address for each in addresses):
            return name
    return None
