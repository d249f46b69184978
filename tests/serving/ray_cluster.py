"""A Ray cluster of this machine for tests, whose nodes are processes that come and go."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

import psutil

__all__ = ["RAY_ENVIRONMENT", "cluster_of", "node_of", "rank_processes"]

#: Ray's token is in the environment and not in the user's home, and Ray sends no usage report. A process reads the
#: token once, so all clusters that it starts have the same.
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextlib.contextmanager
def cluster_of(num_cpus: int) -> Iterator[Any]:
    """Starts a cluster whose head has some cores to give away, and leaves the environment as it was afterwards."""
    before = dict(os.environ)
    os.environ |= {**RAY_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=node_of(num_cpus))
    try:
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ |= before


def node_of(num_cpus: int) -> dict[str, Any]:
    """Arguments of a node that is small enough to stand beside others."""
    return {"num_cpus": num_cpus, "object_store_memory": 10**8, "include_dashboard": False}


def rank_processes() -> list[psutil.Process]:
    """The processes of all ranks on the cluster, the oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "_RankActor" in " ".join(process.cmdline()) or "_RankActor" in process.name():
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())
