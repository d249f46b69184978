"""The documentation keeps up with the code: links lead somewhere, examples name what exists, commands parse."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from partsong import parse_strategy
from partsong.cli import parse
from partsong.cli.options import Demo, Image, Reasoning, Think, Video
from partsong.parallel import mesh_for
from partsong.reasoning.strategies import parse_thinking
from partsong.samplers.registry import strategies
from tests.tables import documents

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").glob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands(text: str) -> list[list[str]]:
    """The arguments of every ``partsong`` command in fenced blocks and inline code."""
    lines = [line for _, body in FENCE.findall(text) for line in body.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(partsong (?:image|demo|bench|list|env)[^`]*)`", FENCE.sub("", text))
    found = [line[line.index("partsong ") :] for line in lines if re.search(r"(^|-m )partsong \w", line)]
    return [shlex.split(line, comments=True)[1:] for line in found]


def runs() -> list[tuple[str, list[str]]]:
    pairs = [(name(path), args) for path in PAGES for args in commands(path.read_text(encoding="utf-8"))]
    # In tables a command stands without its arguments.
    return [(page, args) for page, args in pairs if len(args) > 1 or args == ["demo"]]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = LINK.findall(path.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (path.parent / target).exists()]
    assert not missing


def test_every_strategy_has_a_page() -> None:
    for strategy in strategies():
        assert (ROOT / "docs" / "methods" / f"{strategy}.md").is_file()


@pytest.mark.parametrize("path", documents(), ids=name)
def test_tables_are_what_the_code_says(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == documents()[path], "run python -m tests.tables"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_examples_name_what_exists(path: Path) -> None:
    for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("page", "args"), runs(), ids=lambda value: value if isinstance(value, str) else None)
def test_commands_parse(page: str, args: list[str]) -> None:
    options = parse(args)
    if isinstance(options, Image | Video) and not getattr(options, "resume", None):
        strategies = [parse_strategy(text) for text in options.strategy]
        if options.nproc is not None:
            mesh_for(strategies, options.nproc)
    elif isinstance(options, Think | Reasoning):
        for text in options.strategies if isinstance(options, Reasoning) else [options.strategy]:
            assert text == "greedy" or parse_thinking(text)
    else:
        assert isinstance(options, Demo | Video) or args[0] in ("bench", "list", "env", "text", "eval")
