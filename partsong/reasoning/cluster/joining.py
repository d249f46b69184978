"""Connects this process to a Ray cluster."""

from __future__ import annotations

import os
import socket
from typing import Any

from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["import_ray", "join_cluster"]

#: Seconds in which a server at an address must answer.
_PATIENCE = 10.0


def import_ray() -> Any:
    """Returns the module of Ray.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UnsupportedError(f"{error}; install partsong[scale] to run on a cluster") from error
    return ray


def join_cluster(address: str | None) -> bool:
    """Connects this process to a cluster; says whether it had to start one, on this machine only.

    Args:
        address: of the cluster; "auto" takes the one that runs on this machine. None takes the one this process is
            connected to, or ``RAY_ADDRESS``, or starts one.

    Raises:
        ArgumentError: no cluster is there, or this process is connected to one already and another one is asked for.
        UnsupportedError: Ray is not installed.
    """
    ray = import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ArgumentError(
                f"address={address!r}, but this process is connected to a Ray cluster already; leave the address out"
            )
        return False
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _check_reachable(address)
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise ArgumentError(f"no Ray cluster could be reached at address={address!r}: {error}") from error
    return address == "local"


def _check_reachable(address: str) -> None:
    """Refuses an address without a server, for which Ray would wait minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except OSError as error:
        raise ArgumentError(f"no Ray cluster could be reached at address={address!r}: {error}") from error
