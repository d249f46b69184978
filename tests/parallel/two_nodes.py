"""Makes two machines out of one: network namespaces with names of their own, joined by a pair of virtual cables.

This needs Linux, root, iproute2 and util-linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

#: What `ip netns exec` lays over /etc inside a namespace.
ETC = Path("/etc/netns")


@dataclass(frozen=True, slots=True)
class NetworkNode:
    """Names a machine of its own: its namespace, its host name and its address."""

    namespace: str
    host: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Returns a command that runs on this machine under its host name."""
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", f'hostname {self.host} && exec "$@"', "sh", *arguments]


def missing() -> str | None:
    """Says what keeps this machine from having namespaces; None where nothing does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    probe = f"partsong-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


@contextmanager
def two_nodes() -> Iterator[tuple[NetworkNode, NetworkNode]]:
    """Opens two machines that reach each other by name and nobody else, and takes them away at the end."""
    tag = f"partsong-{os.getpid()}"
    nodes = (NetworkNode(f"{tag}-a", "node-a", "10.213.0.1"), NetworkNode(f"{tag}-b", "node-b", "10.213.0.2"))
    hosts = "".join(f"{node.address} {node.host}\n" for node in nodes)
    with ExitStack() as open_nodes:
        for node in nodes:
            _ip("netns", "add", node.namespace)
            open_nodes.callback(_ip, "netns", "delete", node.namespace)
            (ETC / node.namespace).mkdir(parents=True)
            open_nodes.callback(shutil.rmtree, ETC / node.namespace)
            (ETC / node.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}", encoding="utf-8")
        first, second = (node.namespace for node in nodes)
        _ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
        for node in nodes:
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", "cable")
            _ip("-n", node.namespace, "link", "set", "cable", "up")
            _ip("-n", node.namespace, "link", "set", "lo", "up")
        yield nodes


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
