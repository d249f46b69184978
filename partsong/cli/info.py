"""Runs ``partsong env`` and ``partsong list``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from typing import Any

from partsong.cli.options import Env, List
from partsong.cli.table import table
from partsong.errors import ArgumentError
from partsong.jobs.machine import describe_machine

__all__ = ["env_summary", "list_rows", "list_summary", "show_env", "show_list"]


def show_env(options: Env) -> dict[str, Any]:
    """Describes this machine, for ``partsong env``."""
    return {"command": "env", **describe_machine()}


def env_summary(result: dict[str, Any]) -> str:
    """Returns a line for each fact."""
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
    """Returns the rows of what the user asked to list."""
    return {"command": "list", "what": options.what, "rows": list_rows(options)}


def list_summary(result: dict[str, Any]) -> str:
    """Returns the rows as a table."""
    return table(result["rows"]) if result["rows"] else f"no {result['what']} in this version"


def list_rows(options: List) -> list[dict[str, Any]]:
    """Returns models, strategies, supported pairs, rules, caches, drafters, thinking methods or suites as flat rows."""
    listers = {
        "models": _models,
        "strategies": _strategies,
        "support": lambda: _support_of(options.name) if options.name is not None else _support(),
        "rules": _rules,
        "caches": _caches,
        "drafters": _drafters,
        "thinking": _thinking,
        "suites": _suites,
    }
    if options.name is not None and options.what != "support":
        raise ArgumentError(f"partsong list {options.what} takes no name; {options.name!r} was given")
    return listers[options.what]()


def _models() -> list[dict[str, Any]]:
    from partsong import zoo

    return [{"name": row.name, "kind": row.kind, "description": row.description} for row in zoo.MODELS.values()]


def _strategies() -> list[dict[str, Any]]:
    from partsong.samplers.registry import strategies, use_when

    return [
        {
            "name": name,
            "class": kind().kind,
            "options": _options(_defaults(kind)),
            "description": _first_line(kind),
            "use_when": use_when(kind),
        }
        for name, kind in strategies().items()
    ]


def _support() -> list[dict[str, Any]]:
    from partsong.samplers.support import support_rows

    groups: dict[tuple[str, str], list[str]] = {}
    for row in support_rows():
        for strategy in list(row)[2:]:
            groups.setdefault((strategy, row[strategy]), []).append(row["architecture"])
    return [
        {"strategy": strategy, "class": kind, "architectures": ", ".join(architectures)}
        for (strategy, kind), architectures in groups.items()
    ]


def _support_of(model: str) -> list[dict[str, Any]]:
    from partsong.planner.models import MODELS
    from partsong.samplers.support import rows_for, support_of

    # A published model is known by the name that plans have for it, or by that of the hub.
    names = {text: row.denoiser for name, row in MODELS.items() for text in (name, row.checkpoint)}
    return [row for adapter in rows_for(model, names) for row in support_of(adapter)]


def _rules() -> list[dict[str, Any]]:
    from partsong.samplers.any_order import PICTURE_RULES
    from partsong.samplers.text import RULES

    of_text = [
        {
            "name": name,
            # The bound holds only for rules that never look at the drawn token and never take one back.
            "certificate": "certificate" if kind.unbiased and not kind.revises else "no certificate",
            "options": _options(_defaults(kind)),
            "description": _first_line(kind),
        }
        for name, kind in RULES.items()
    ]
    of_pictures = [
        {
            "name": name,
            "certificate": f"pictures, {kind.kind}",
            "options": _options(_defaults(kind)),
            "description": _first_line(kind),
        }
        for name, kind in PICTURE_RULES.items()
    ]
    return of_text + of_pictures


def _caches() -> list[dict[str, Any]]:
    from partsong.samplers.text import CACHES

    return _described(CACHES)


def _drafters() -> list[dict[str, Any]]:
    from partsong.reasoning.local.speculation.registry import DRAFTERS

    return _described(DRAFTERS)


def _described(kinds: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "options": _options(_defaults(kind)), "description": _first_line(kind)}
        for name, kind in kinds.items()
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
    """Spells knobs with their defaults as command lines do; a knob without a default ends in dots."""
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
