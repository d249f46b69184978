"""``partsong env`` and ``partsong list``."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, signature
from typing import Any

import partsong
from partsong.cli.options import Env, List
from partsong.cli.table import table

__all__ = ["env", "env_summary", "list_rows", "list_summary", "show_env", "show_list"]

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "triton", "xformers", "kernels")


def env() -> dict[str, Any]:
    """Versions, devices, cores with their instruction set, and attention backends of this machine."""
    import torch
    import torch.distributed as dist

    from partsong import kernels

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "command": "env",
        "partsong": partsong.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": _cores(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch_threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "distributed": [name for name in ("gloo", "nccl") if dist.is_backend_available(name)],
        "attention": [
            {"name": name, "usable": usable, "reason": reason} for name, usable, reason in kernels.available()
        ],
    }


def show_env(options: Env) -> dict[str, Any]:
    """`env`, for the command."""
    return env()


def env_summary(result: dict[str, Any]) -> str:
    """A line for each fact."""
    lines = []
    for name, value in result.items():
        if name == "attention":
            value = "".join(f"\n  {row['name']}: {row['reason'] or 'usable'}" for row in value)
        elif name == "packages":
            value = ", ".join(f"{package} {number}" for package, number in value.items() if number)
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        if name != "command":
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def show_list(options: List) -> dict[str, Any]:
    """The rows of what was asked for."""
    return {"command": "list", "what": options.what, "rows": list_rows(options)}


def list_summary(result: dict[str, Any]) -> str:
    """The rows as a table."""
    return table(result["rows"]) if result["rows"] else f"no {result['what']} in this version"


def list_rows(options: List) -> list[dict[str, Any]]:
    """The models, strategies, supported pairs, rules, caches, ways to think or suites there are, as flat rows."""
    made = {
        "models": _models,
        "strategies": _strategies,
        "support": _support,
        "rules": _rules,
        "caches": _caches,
        "thinking": _thinking,
        "suites": _suites,
    }
    return made[options.what]()


def _models() -> list[dict[str, Any]]:
    from partsong import zoo

    return [{"name": row.name, "kind": row.kind, "description": row.description} for row in zoo.MODELS.values()]


def _strategies() -> list[dict[str, Any]]:
    from partsong.samplers.registry import STRATEGIES

    return [
        {
            "name": name,
            "class": kind().kind,
            "options": _options(_defaults(kind)),
            "description": _first_line(kind),
        }
        for name, kind in STRATEGIES.items()
    ]


def _support() -> list[dict[str, Any]]:
    from partsong.samplers.support import support_rows

    groups: dict[tuple[str, str], list[str]] = {}
    for row in support_rows():
        for strategy in list(row)[2:]:
            groups.setdefault((strategy, row[strategy]), []).append(row["architecture"])
    return [
        {"strategy": strategy, "class": kind, "architectures": ", ".join(found)}
        for (strategy, kind), found in groups.items()
    ]


def _rules() -> list[dict[str, Any]]:
    from partsong.samplers.text import RULES

    return [
        {
            "name": name,
            # Where a rule never looks at the drawn token and never takes one back, the bound holds.
            "certificate": "certificate" if kind.unbiased and not kind.revises else "no certificate",
            "options": _options(_defaults(kind)),
            "description": _first_line(kind),
        }
        for name, kind in RULES.items()
    ]


def _caches() -> list[dict[str, Any]]:
    from partsong.samplers.text import CACHES

    return [
        {"name": name, "options": _options(_defaults(kind)), "description": _first_line(kind)}
        for name, kind in CACHES.items()
    ]


def _thinking() -> list[dict[str, Any]]:
    from partsong.reasoning.strategies import STRATEGIES, knobs_of

    return [
        {
            "name": name,
            "options": _options({knob: signature(strategy).parameters[knob].default for knob in knobs_of(name)}),
            "description": _first_line(strategy),
        }
        for name, strategy in STRATEGIES.items()
    ]


def _suites() -> list[dict[str, Any]]:
    from partsong.cli.eval import SUITES

    return [{"name": name, "description": description} for name, description in SUITES.items()]


def _defaults(kind: Any) -> dict[str, Any]:
    return {knob.name: knob.default for knob in fields(kind)}


def _options(defaults: Mapping[str, Any]) -> str:
    """Knobs with their defaults, as command lines spell them; a knob without one must be given."""
    return ", ".join(
        f"{name}=..." if default is MISSING or default is Parameter.empty else f"{name}={_spelled(default)}"
        for name, default in defaults.items()
    )


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    if isinstance(value, str):
        return value.replace("\n", "\\n")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _first_line(kind: Any) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _cores() -> int:
    # The cores this process may use, which in a container are fewer than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
