"""The structure of the house: no circle of imports, a noun for one class, a strategy named in one place."""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from partsong import PatchPipeline, UnsupportedError, generate
from partsong.samplers.registry import BUILT_IN, row_of

ROOT = Path(__file__).resolve().parent.parent
#: Most files that may stand side by side in a folder.
MAX_FILES = 36


@functools.cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Every file of the two packages by its module's name; a package's own file under the package's name."""
    files: dict[str, tuple[Path, ast.Module]] = {}
    for package in (ROOT / "partsong", ROOT / "zoo" / "partsong_zoo"):
        for path in sorted(package.rglob("*.py")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            files[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return files


def imports(name: str) -> Iterator[str]:
    """The modules that a module imports anywhere, in functions and for type checking too."""
    for node in ast.walk(modules()[name][1]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                target = f"{node.module}.{alias.name}"
                yield from (each for each in (target if target in modules() else node.module,) if each in modules())


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(edges[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                components.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return components


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_circle_of_imports() -> None:
    # The lazy top of the package names everything below it, and the command line asks it for its version.
    files = set(modules()) - {"partsong"}
    edges = {name: {target for target in imports(name) if target in files and target != name} for name in files}
    # A package's own file gathers what its modules offer: only what goes through it from outside is an arrow.
    gather = {name for name in files if modules()[name][0].name == "__init__.py"}
    edges = {
        name: {t for t in targets if t not in gather or not name.startswith(f"{t}.")} for name, targets in edges.items()
    }
    assert circles(edges) == []


def test_a_noun_belongs_to_one_class() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for name, (_, tree) in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert {noun: where for noun, where in homes.items() if len(where) > 1} == {}


def test_folders_stay_small() -> None:
    counts = Counter(path.parent for path, _ in modules().values())
    assert {str(folder): count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_a_strategy_is_named_in_the_registry_and_its_own_room_only() -> None:
    """What runs strategies (jobs, evals) may choose some; the engine, the tables and the exports may not name one."""
    rooms = {row.strategy.__name__: modules()[row.strategy.__module__][0] for row in BUILT_IN}
    strays = []
    for name, (path, tree) in modules().items():
        if not name.startswith(("partsong.parallel", "partsong.samplers", "partsong.cli")) and name != "partsong":
            continue
        if name == "partsong.samplers.registry":
            continue
        for node in ast.walk(tree):
            typed = node.name if isinstance(node, ast.alias) else node.id if isinstance(node, ast.Name) else None
            if typed in rooms and not _may_name(name, path, rooms[typed], rooms):
                strays.append(f"{name}: {typed}")
    assert sorted(set(strays)) == []


def _may_name(name: str, path: Path, home: Path, rooms: dict[str, Path]) -> bool:
    """A room's own files may, and so may the file of a strategy that derives from another."""
    has_folder = home.stem in ("strategy", "parallel_vae")
    return path == home or (has_folder and path.parent == home.parent) or path in rooms.values()


def test_loops_are_found_by_class_and_not_by_name() -> None:
    namesake = type("PatchPipeline", (PatchPipeline,), {"__slots__": ()})
    assert row_of(PatchPipeline()).loop is not None
    assert row_of(namesake()).loop is None

    class Pipeline:
        components: ClassVar[dict[str, Any]] = {}

        def __call__(self, prompt: str) -> str:
            return prompt

    plan: Any = SimpleNamespace(target=Pipeline(), loop=namesake(), check_attached=lambda: None)
    with pytest.raises(UnsupportedError, match="PatchPipeline needs a loop of its own and none is registered"):
        generate(plan, prompt="a red circle")
