"""Names this machine and its memory."""

from __future__ import annotations

import platform
import re

import torch

from partsong.cores import usable_cores

__all__ = ["device_memory", "hardware_name"]


def hardware_name() -> str:
    """Names this machine by its devices, in letters that a file name may have."""
    if torch.cuda.is_available():
        text = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"
    else:
        text = f"{usable_cores()} cores {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def device_memory(kind: str) -> float:
    """Returns the bytes that a device of this machine has, "cuda" or "cpu"."""
    if kind == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    import psutil

    return float(psutil.virtual_memory().total)
