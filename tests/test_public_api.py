"""The public names, their signatures and the cost of importing them are promises: a change here is a decision.

After a deliberate change, rewrite the snapshot and say so in CHANGELOG.md:

    python -m tests.test_public_api
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import partsong
from partsong.parallel import Strategy
from partsong.samplers.registry import strategies

SNAPSHOT = Path(__file__).with_name("public_api.json")
BASE_MODULES = ("errors", "ledger", "model_folders", "outputs", "progress", "seeds", "videos", "zoo", "cli")
MAX_IMPORT_SECONDS = 0.3


def signature(thing: Any) -> str:
    """The call signature as written, addresses and quotes of annotations left out, and bounds of knobs too."""
    try:
        written = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    if isinstance(thing, type) and issubclass(thing, Strategy):
        hints = get_type_hints(thing)
        parameters = [p.replace(annotation=without_bounds(hints.get(p.name))) for p in written.parameters.values()]
        written = written.replace(parameters=parameters)
    return str(written).replace("'", "")


def without_bounds(hint: Any) -> str:
    """The type of a knob, without what its values may be: ``int | None``, ``str`` for a choice of words."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    values = [type(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    plain = [*(kind for kind in kinds if get_origin(kind) is not Literal and kind is not type(None)), *values]
    names = [kind.__name__ if type(kind) is type else str(kind).removeprefix("typing.") for kind in plain]
    return " | ".join([*dict.fromkeys(names), *(["None"] if type(None) in kinds else [])])


def describe(thing: Any) -> dict[str, Any]:
    """What a caller may rely on: a function's signature; a class's too, and its public members."""
    if not inspect.isclass(thing):
        return {"kind": "function", "signature": signature(thing)}
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    members: dict[str, str] = {}
    classes = [kind for kind in reversed(thing.__mro__) if kind.__module__.startswith("partsong")]
    for name, member in {name: member for kind in classes for name, member in vars(kind).items()}.items():
        if name.startswith("_") or name in fields or isinstance(thing, enum.EnumMeta):
            continue
        if isinstance(member, property):
            members[name] = "property"
        elif callable(getattr(thing, name)):
            members[name] = signature(getattr(thing, name))
    bases = [base.__name__ for base in thing.__bases__ if base is not object]
    return {"kind": "class", "signature": signature(thing), "bases": bases, "members": dict(sorted(members.items()))}


def public_api() -> dict[str, Any]:
    """Every name of `partsong.__all__` and of `partsong.kernels.__all__`, described."""
    from partsong import kernels

    top = {name: describe(getattr(partsong, name)) for name in sorted(partsong.__all__)}
    return top | {f"kernels.{name}": describe(getattr(kernels, name)) for name in sorted(kernels.__all__)}


def test_signatures_are_frozen() -> None:
    promised, found = json.loads(SNAPSHOT.read_text(encoding="utf-8")), public_api()
    assert sorted(found) == sorted(promised), "names came or went: see the docstring of this file"
    changed = {name: (promised[name], found[name]) for name in promised if promised[name] != found[name]}
    assert not changed, f"promised, found: {json.dumps(changed, indent=1)}"


def test_lazy_table_names_every_export() -> None:
    assert set(partsong._HOME_OF) | {kind.__name__ for kind in strategies().values()} == set(partsong.__all__)
    assert set(partsong.__all__) <= set(dir(partsong))


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"'Ulises'.*Ulysses"):
        _ = partsong.Ulises  # type: ignore[attr-defined]


def fresh(code: str) -> str:
    """Standard output of `code` in a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_cheap() -> None:
    code = "import time; s = time.perf_counter(); import partsong; print(time.perf_counter() - s)"
    # The best of three: the machine may be busy, the import itself is what is promised.
    seconds = min(float(fresh(code)) for _ in range(3))
    assert seconds < MAX_IMPORT_SECONDS


def test_base_modules_load_no_torch() -> None:
    names = [f"partsong.{name}" for name in BASE_MODULES]
    code = f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\nprint('torch' in sys.modules)"
    assert fresh(code) == "False"


def test_version_is_one_fact() -> None:
    assert importlib.import_module("importlib.metadata").version("partsong") == partsong.__version__


def write() -> None:
    """Rewrites the snapshot."""
    SNAPSHOT.write_text(json.dumps(public_api(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"{SNAPSHOT} is rewritten: say why in CHANGELOG.md")
