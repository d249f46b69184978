"""The stage `backends`: which attention kernels can run here."""

from __future__ import annotations

from collections.abc import Iterator

from partsong.evals.gpu.findings import Equipment, Finding, holds, stated
from partsong.kernels import available

__all__ = ["REQUIRED", "backends"]

#: What has to run, by device; other backends need packages or GPUs of their own.
REQUIRED = {"cuda": ("cudnn", "flash", "efficient", "triton", "naive"), "cpu": ("cpu_flash", "naive")}


def backends(equipment: Equipment) -> Iterator[Finding]:
    """Tells of every backend whether it is usable."""
    for name, usable, reason in available():
        if name in REQUIRED[equipment.device]:
            yield holds(name, usable, reason or "usable", "usable")
        else:
            yield stated(name, reason or "usable")
