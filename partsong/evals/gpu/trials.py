"""Lists the stages, and says what this machine has."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from partsong.evals.gpu.attention_kernels import attention_kernels
from partsong.evals.gpu.backends import backends
from partsong.evals.gpu.drills import drills
from partsong.evals.gpu.every_strategy import every_strategy
from partsong.evals.gpu.exchanges import exchanges
from partsong.evals.gpu.findings import Equipment, Trial
from partsong.evals.gpu.flux import calibration, flux
from partsong.evals.gpu.host import host
from partsong.evals.gpu.nccl import meshes, nccl
from partsong.evals.gpu.small_kernels import small_kernels
from partsong.evals.gpu.speeds import speeds
from partsong.evals.gpu.steps import steps
from partsong.evals.gpu.texts import texts
from partsong.jobs.machine import describe_machine

__all__ = ["TRIALS", "equipment_here", "machine_facts"]

#: The stages in their order: what is right comes before what is fast.
TRIALS = (
    Trial("backends", 60, backends),
    Trial("attention", 120, attention_kernels),
    Trial("small", 60, small_kernels),
    Trial("nccl", 40, nccl, gpus=1),
    Trial("meshes", 60, meshes),
    Trial("strategies", 150, every_strategy),
    Trial("drills", 120, drills),
    Trial("host", 60, host),
    Trial("speeds", 60, speeds),
    Trial("exchange", 60, exchanges),
    Trial("flux", 90, flux),
    Trial("calibration", 60, calibration),
    Trial("text", 60, texts),
    Trial("steps", 150, steps),
)


def equipment_here() -> Equipment:
    """Returns what this machine has, or a CPU where ``PARTSONG_DEVICE=cpu`` asks for that."""
    gpus = 0 if os.environ.get("PARTSONG_DEVICE") == "cpu" else torch.cuda.device_count()
    return Equipment(gpus, torch.cuda.get_device_properties(0).name) if gpus else Equipment()


def machine_facts() -> dict[str, Any]:
    """Returns what ``partsong env`` tells, with the version of NVIDIA's driver where there is one."""
    file = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+[.\d]*", file.read_text(encoding="utf-8")) if file.is_file() else None
    return {**describe_machine(), "driver": driver and driver[0]}
