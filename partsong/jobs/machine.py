"""Describes the machine: versions, devices, cores and attention backends, for results and for ``partsong env``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import partsong
from partsong.cores import usable_cores

__all__ = ["describe_hardware", "describe_machine"]

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "triton", "xformers", "kernels")


def describe_machine() -> dict[str, Any]:
    """Returns versions, devices, cores with their instruction set, and attention backends of this machine."""
    import torch
    import torch.distributed as dist

    from partsong import kernels
    from partsong.accelerator import devices

    return {
        "partsong": partsong.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": [f"{name}, {size / 2**30:.0f} GiB" for name, size in devices()],
        "distributed": [name for name in ("gloo", "nccl", "xccl") if dist.is_backend_available(name)],
        "attention": [
            {"name": name, "usable": usable, "reason": reason} for name, usable, reason in kernels.available()
        ],
    }


def describe_hardware() -> dict[str, Any]:
    """Returns the part of `describe_machine` on which measurements depend, for files of results."""
    machine = describe_machine()
    return {name: machine[name] for name in ("system", "cores", "instruction_set", "gpus", "python", "packages")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
