"""Names this machine and its memory."""

from __future__ import annotations

import platform
import re

import torch

from partsong.accelerator import devices
from partsong.cores import usable_cores

__all__ = ["hardware_name"]


def hardware_name() -> str:
    """Names this machine by its devices, in letters that a file name may have."""
    if here := devices():
        text = f"{len(here)}x {here[0][0]}"
    else:
        text = f"{usable_cores()} cores {torch.backends.cpu.get_cpu_capability()} {platform.machine()}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
