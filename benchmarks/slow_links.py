"""Runs a script whose ranks exchange over a slow link: in a network namespace whose loopback a token bucket slows down.

This needs Linux, root and iproute2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["run_over"]

_NAMESPACE = "partsong-bench"
_BURST, _LATENCY = "1mb", "400ms"


def run_over(link: str | None, script: Path, settings: Mapping[str, Any]) -> Any:
    """Runs a script in a process of its own, and returns what its last line says in JSON.

    Args:
        link: rate as tc writes it; None is plain loopback.
        script: what to run.
        settings: its only argument, as JSON.
    """
    command = [sys.executable, str(script), json.dumps(settings)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if link is not None:
        command = ["ip", "netns", "exec", _NAMESPACE, *command]
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "PARTSONG_SHARED_MEMORY": "0"}  # all must pass through the link
        _open_namespace(link)
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    finally:
        if link is not None:
            subprocess.run(["ip", "netns", "delete", _NAMESPACE], check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _open_namespace(rate: str) -> None:
    inside = ["ip", "netns", "exec", _NAMESPACE]
    subprocess.run(["ip", "netns", "add", _NAMESPACE], check=True)
    subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
    bucket = ["tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
    subprocess.run([*inside, "tc", "qdisc", "replace", "dev", "lo", "root", *bucket], check=True)
