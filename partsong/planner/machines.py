"""Reads what people write for their devices and links: ``4x4090`` with ``pcie4``."""

from __future__ import annotations

import re
from dataclasses import replace

from partsong.errors import ArgumentError
from partsong.planner.devices import device_named, link_named
from partsong.planner.hardware import Device, Link, Machine

__all__ = ["machine_named"]

_DEVICES = re.compile(r"(?:(\d+)x)?([\w.-]+)", re.ASCII)


def machine_named(
    devices: str | Device,
    link: str | Link,
    *,
    ranks: int | None = None,
    memory: float | None = None,
    per_node: int | None = None,
    across: str | Link | None = None,
) -> Machine:
    """Reads a number of equal devices and their links.

    Args:
        devices: ``4x4090``, the name of one device, or a device that was measured.
        link: between devices of a node, by name or measured.
        ranks: how many devices, where `devices` does not say.
        memory: bytes of a device; None takes what it has.
        per_node: devices of a node; None takes all.
        across: the link between nodes; None takes `link`.

    Raises:
        ArgumentError: what cannot be read, unknown names, devices that do not fill nodes; lists the known names.

    Example:
        >>> machine_named("4x4090", "pcie4").ranks
        4
    """
    number, device = _devices(devices)
    number = ranks or number
    if memory is not None:
        if memory <= 0:
            raise ArgumentError(f"memory={memory:g}: give the bytes that a device has")
        device = replace(device, memory=memory)
    if per_node is not None and (per_node < 1 or number % per_node):
        raise ArgumentError(f"{number} devices do not fill nodes of {per_node}; use a divisor of {number}")
    if across is not None and per_node is None:
        raise ArgumentError("a link between nodes says nothing without the devices of a node; give those as well")
    return Machine(
        device=device,
        link=link_named(link) if isinstance(link, str) else link,
        ranks=number,
        per_node=per_node or number,
        across=link_named(across) if isinstance(across, str) else across,
    )


def _devices(text: str | Device) -> tuple[int, Device]:
    if isinstance(text, Device):
        return 1, text
    match = _DEVICES.fullmatch(text)
    if match is None or match[1] == "0":
        raise ArgumentError(f"devices {text!r}: write a number and a name, as in 4x4090")
    return int(match[1] or 1), device_named(match[2])
