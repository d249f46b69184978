"""Lists common devices and links by public figures, each with its source; `partsong calibrate` measures instead."""

from __future__ import annotations

import re
from collections.abc import Mapping

from partsong.errors import ArgumentError
from partsong.knobs import did_you_mean
from partsong.planner.hardware import Device, Link

__all__ = ["DEVICES", "LINKS", "REPEATED", "USUAL_LINK", "device_named", "link_named"]

_TERA, _GIGA = 1e12, 1e9
#: What published latencies of several devices take beyond shared work, messages and decoding, whatever their number:
#: the share that suits all papers but the one that is predicted (benchmarks/results/planner/2026-11-27-held-out.md).
REPEATED = 0.015


def _gpu(
    name: str, tera: float, giga: float, memory: float, cache: float, units: int, source: str, *, matmul: float = 0.7
) -> Device:
    return Device(
        name=name,
        flops=tera * _TERA,
        bandwidth=giga * _GIGA,
        memory=memory * _GIGA,
        cache=cache * 1e6,
        units=units,
        matmul=matmul,
        attention=0.8 * matmul,
        repeated=REPEATED,
        source=source,
    )


#: Words of a maker before the name of a device.
_MAKER = re.compile(r"^(nvidia|geforce|rtx|[ _-])+")
#: Rates are of bfloat16 without sparsity, added up in single precision, from the makers' data sheets. Programs reach
#: 0.7 of them, and more where a maker has capped the rate but not the power.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("h200", 989, 4800, 141, 50, 132, "NVIDIA H200 SXM data sheet"),
        _gpu("h100", 989, 3350, 80, 50, 132, "NVIDIA H100 SXM data sheet"),
        _gpu("h20", 148, 4000, 96, 60, 78, "NVIDIA H20 data sheet", matmul=0.8),
        _gpu("a100", 312, 2039, 80, 40, 108, "NVIDIA A100 SXM 80 GB data sheet"),
        _gpu("l40", 181, 864, 48, 96, 142, "NVIDIA L40 data sheet"),
        _gpu("l20", 119.5, 864, 48, 96, 92, "NVIDIA L20 data sheet", matmul=0.9),
        _gpu("5090", 209.5, 1792, 32, 96, 170, "NVIDIA RTX Blackwell architecture paper, appendix A"),
        _gpu("4090", 165.2, 1008, 24, 72, 128, "NVIDIA Ada architecture paper, appendix A"),
        _gpu("3090", 71, 936, 24, 6, 82, "NVIDIA Ampere GA102 architecture paper, appendix A"),
    )
}

#: Seconds that the host takes to begin an exchange: 20 microseconds are this package's, the rest is PyTorch's
#: (benchmarks/ranks/host_cost.py).
_POST = 50e-6

#: Rates at which a rank sends and receives at the same time; programs reach about two thirds of them.
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(name="nvlink", latency=12e-6, bandwidth=300e9, post=_POST, source="NVLink 4: 450 GB/s each way"),
        Link(name="nvlink3", latency=12e-6, bandwidth=200e9, post=_POST, source="NVLink 3: 300 GB/s each way"),
        Link(name="pcie5", latency=20e-6, bandwidth=40e9, post=_POST, source="PCI Express 5.0 x16: 63 GB/s each way"),
        Link(name="pcie4", latency=20e-6, bandwidth=20e9, post=_POST, source="PCI Express 4.0 x16: 31.5 GB/s each way"),
        Link(name="100gbit", latency=30e-6, bandwidth=10e9, post=_POST, source="Ethernet of 100 Gbit/s"),
        Link(name="10gbit", latency=60e-6, bandwidth=1.1e9, post=_POST, source="Ethernet of 10 Gbit/s, TCP"),
        Link(name="1gbit", latency=120e-6, bandwidth=0.117e9, post=_POST, source="Ethernet of 1 Gbit/s, TCP"),
    )
}


#: The link of data-centre devices; others have ``pcie4``.
USUAL_LINK = {"h200": "nvlink", "h100": "nvlink", "h20": "nvlink", "a100": "nvlink3"}


def device_named(name: str) -> Device:
    """Returns a device by name; words of its maker before it, as in ``RTX 4090``, do not matter.

    Raises:
        ArgumentError: an unknown name; lists the known ones.

    >>> device_named("rtx4090") == device_named("GeForce-RTX-4090") == device_named("4090")
    True
    """
    short = _MAKER.sub("", name.lower())
    if short not in DEVICES:
        raise ArgumentError(
            f"no device {name!r} is known; the known ones are {', '.join(DEVICES)} (or calibrate yours)"
            f"{did_you_mean(short, DEVICES)}"
        )
    return DEVICES[short]


def link_named(name: str) -> Link:
    """Returns a link by name.

    Raises:
        ArgumentError: an unknown name; lists the known ones.
    """
    if name.lower() not in LINKS:
        raise ArgumentError(f"no link {name!r} is known; the known ones are {', '.join(LINKS)} (or calibrate yours)")
    return LINKS[name.lower()]
