"""The documentation keeps up with the code: links lead somewhere, examples name what exists, commands parse."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from partsong import parse_strategy
from partsong.cli import parse
from partsong.cli.auto import AUTO
from partsong.cli.options import Demo, Image, Think, Video
from partsong.cli.suites.options import Reasoning
from partsong.parallel import mesh_for
from partsong.reasoning.strategies import parse_thinking
from partsong.samplers.registry import strategies
from tests.documents import LINK, PAGES, READ, ROOT, commands, examples, name, sentences, words
from tests.results import TEMPLATE
from tests.results import documents as results
from tests.tables import documents as tables
from tests.version_sets import skip_unless_pinned

#: Words of a sentence that is hard to read, and the part of sentences that may be.
LONG, MOST_LONG = 35, 0.02


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


@pytest.mark.parametrize("path", tables(), ids=name)
def test_tables_are_what_the_code_says(path: Path) -> None:
    if path.name == "support.md":  # it counts the models of diffusers
        skip_unless_pinned("diffusers")
    assert path.read_text(encoding="utf-8") == tables()[path], "run python -m tests.tables"


@pytest.mark.parametrize("path", results(), ids=name)
def test_results_are_what_their_files_say(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == results()[path], "run python -m tests.results"


def test_no_figure_of_the_results_is_typed_by_hand() -> None:
    """What is left of the page without its places for figures, code and the targets of links has no digit in it."""
    text = re.sub(r"\{\{.*?\}\}|`[^`]*`|\]\([^)]*\)", "", TEMPLATE.read_text(encoding="utf-8"))
    for named in ("SmolLM2-135M", "GSM8K"):
        text = text.replace(named, "")
    assert not [line for line in text.splitlines() if re.search(r"\d", line)]


def test_sentences_are_short() -> None:
    """Over all pages that people read from top to bottom."""
    lengths = {sentence: words(sentence) for path in READ for sentence in sentences(path.read_text(encoding="utf-8"))}
    long = [sentence for sentence, length in lengths.items() if length > LONG]
    assert len(long) < MOST_LONG * len(lengths), "\n".join(long)


def need_extras(body: str) -> None:
    """Skips an example of a package that only the environment of `make test-full` has."""
    if "from torchao" in body:
        pytest.importorskip("torchao", reason="torchao is not installed: make test-full brings it")


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_python_examples_name_what_exists(path: Path) -> None:
    for body in examples(path):
        need_extras(body)
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)


def blocks() -> list[tuple[str, int, str]]:
    """Every Python block: its page, its number there, and its text."""
    return [(name(path), number, body) for path in PAGES for number, body in enumerate(examples(path))]


#: Blocks that are not run here, and why.
NOT_RUN = {
    ("README.md", 0): "needs a large model; test_readme_example_runs puts a small one in its place",
    ("docs/engines.md", 0): "asks a server",
    ("docs/engines.md", 3): "starts llama.cpp on a file of 4-bit weights",
    ("docs/engines.md", 4): "starts two engines on a cluster",
    ("docs/thinking-eval.md", 0): "asks 100 questions three times",
    ("docs/thinking-eval.md", 1): "draws 64 answers to 100 questions",
    ("docs/thinking-eval.md", 3): "evaluates a task file of the user's",
    ("docs/your-script.md", 0): "needs a large model; tests/test_your_script.py puts a small one in its place",
    ("docs/your-script.md", 1): "the same",
    ("docs/your-script.md", 2): "the same",
}

#: Blocks that take seconds for what has tests of its own, and where: ``make test-full`` runs them.
LATER = {
    ("docs/engines.md", 1): "tests/reasoning/test_ranks_engine.py",
    ("docs/methods/expert-parallel.md", 0): "tests/parallel/test_expert_parallel.py",
    ("docs/methods/hogwild.md", 0): "tests/reasoning/test_hogwild_strategy.py",
    ("docs/scaling-out.md", 0): "tests/parallel/test_shares.py",
    ("docs/speculation.md", 2): "tests/reasoning/test_saguaro.py",
    ("docs/text.md", 1): "tests/parallel/test_text_models.py",
}


@pytest.mark.parametrize(
    ("page", "number", "body"),
    [
        pytest.param(*block, id=f"{block[0]}-{block[1]}", marks=[pytest.mark.full] * (block[:2] in LATER))
        for block in blocks()
        if block[:2] not in NOT_RUN
    ],
)
@pytest.mark.slow
def test_python_examples_run_as_printed(
    page: str, number: int, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_extras(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    if "launch(" in body:  # its ranks import the file
        script = tmp_path / "example.py"
        script.write_text(body)
        subprocess.run([sys.executable, str(script)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return
    exec(compile(body, f"{page}, example {number}", "exec"), {"__name__": "__main__"})


def test_examples_that_are_not_run_are_there() -> None:
    assert NOT_RUN.keys() | LATER.keys() <= {block[:2] for block in blocks()}
    assert all((ROOT / file).is_file() for file in LATER.values())


@pytest.mark.parametrize(("page", "args"), runs(), ids=lambda value: value if isinstance(value, str) else None)
def test_commands_parse(page: str, args: list[str]) -> None:
    options = parse(args)
    if isinstance(options, Image | Video) and not getattr(options, "resume", None):
        strategies = [parse_strategy(text) for text in options.strategy if text != AUTO]
        if options.nproc is not None and AUTO not in options.strategy:
            mesh_for(strategies, options.nproc)
    elif isinstance(options, Think | Reasoning):
        for text in options.strategies if isinstance(options, Reasoning) else [options.strategy]:
            assert text == "greedy" or parse_thinking(text)
    else:
        assert isinstance(options, Demo | Video) or args[0] in (
            "bench",
            "list",
            "env",
            "text",
            "eval",
            "plan",
            "calibrate",
            "serve",
        )
