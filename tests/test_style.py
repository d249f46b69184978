"""House rules a linter does not know: sizes, types, docstrings, and what may not appear where."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.documents import PAGES

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[Path], None]

LIBRARY = sorted(path for package in ("partsong", "zoo/partsong_zoo") for path in (ROOT / package).rglob("*.py"))
SCRIPTS = sorted(
    [*(ROOT / "recipes").rglob("*.py"), *(ROOT / "zoo" / "recipes").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


#: The rules of every file. One test runs all of a file: thousands of little ones would cost more than what they check.
RULES: dict[Path, list[Rule]] = {}


def each(paths: list[Path]) -> Callable[[Rule], Rule]:
    def keep(rule: Rule) -> Rule:
        for path in paths:
            RULES.setdefault(path, []).append(rule)
        return rule

    return keep


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file: walking its tree costs more than a rule does."""
    return list(ast.walk(parse(path)))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(path) if isinstance(node, Function))


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def is_kernel(path: Path) -> bool:
    return "kernels" in path.relative_to(ROOT).parts


def code_lines(function: Function) -> int:
    """Lines from ``def`` to the end, the docstring not counted: explaining must not cost."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        total -= first.end_lineno - first.lineno + 1
    return total


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public modules, classes, functions and methods without a docstring, as dotted names."""
    if ast.get_docstring(tree) is None:
        yield "the module"

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None and not overloaded(node):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")

    yield from visit(tree.body, "")


def overloaded(node: Function | ast.ClassDef) -> bool:
    return any(
        "overload" in ast.unparse(decorator) or ".setter" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def untyped(path: Path) -> Iterator[str]:
    """Functions with a parameter or result that has no annotation.

    ``self`` and ``cls`` need none, nor do device functions: each launch specialises them by the arguments it gives.
    """
    for function in functions(path):
        if any(ast.unparse(getattr(d, "func", d)).endswith(".jit") for d in function.decorator_list):
            continue
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        bare = [a.arg for a in named if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        if bare or function.returns is None:
            yield f"{function.name} (line {function.lineno}): {', '.join(bare) or 'result'}"


@each([path for path in LIBRARY + SCRIPTS + TESTS if not is_kernel(path)])
def file_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{relative(path)} has {lines} lines, at most {MAX_FILE_LINES}: split it by subject"


@each([path for path in LIBRARY + SCRIPTS if not is_kernel(path)])
def functions_are_short(path: Path) -> None:
    long = {f"{f.name} (line {f.lineno})": code_lines(f) for f in functions(path)}
    long = {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES}
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines without docstring: {long}"


@each(LIBRARY)
def public_names_are_documented(path: Path) -> None:
    missing = list(undocumented(parse(path)))
    assert not missing, f"no docstring: {', '.join(missing)}"


@each(LIBRARY + SCRIPTS)
def signatures_are_typed(path: Path) -> None:
    missing = list(untyped(path))
    assert not missing, f"no annotation: {'; '.join(missing)}"


@each([path for path in LIBRARY if "cli" not in path.relative_to(ROOT).parts])
def library_does_not_print(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    called = [c.lineno for c in calls(path) if ast.unparse(c.func) == "print"]
    prints = [line for line in called if "noqa: T201" not in lines[line - 1]]
    assert not prints, f"print() on lines {prints}: use logging; only partsong/cli prints"


@each(LIBRARY + SCRIPTS + TESTS)
def no_bare_except(path: Path) -> None:
    bare = [n.lineno for n in nodes(path) if isinstance(n, ast.ExceptHandler) and n.type is None]
    assert not bare, f"bare except on lines {bare}: name what is expected"


@each(TESTS)
def no_test_sleeps(path: Path) -> None:
    sleeps = [call.lineno for call in calls(path) if ast.unparse(call.func) in ("time.sleep", "sleep")]
    assert not sleeps, f"sleep on lines {sleeps}: wait for the event itself"


# Pickles of launch.py go between a parent and its own children, those of orders.py and objects.py between ranks.
@each([path for path in LIBRARY if path.name not in ("launch.py", "orders.py", "objects.py")])
def nothing_foreign_is_executed(path: Path) -> None:
    """Nothing from a model folder or from model text runs as code: no eval, exec or unpickling."""
    forbidden = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load"}
    found = [f"{ast.unparse(c.func)} (line {c.lineno})" for c in calls(path) if ast.unparse(c.func) in forbidden]
    assert not found, f"{', '.join(found)}"


#: Phrases that stop a native reader, and what to write in their place.
RIDDLES = {
    r"\b(what|that|which) (is|are) none\b": "say what the thing is not",
    r"\b[Ff]ilms?\b": "video",
    r"\bPATIENCE\b": "TIMEOUT",
    r"\btold\b": "given, stated, notified",
    r"\bthe like\b": "name the thing",
    r"\bis behind the\b": "follows, comes after",
    r"\bwhatever (it|they) would\b": "say what happens",
    r"\bcomes? along\b": "bundled",
    r"\bthat are unlike\b": "uneven",
    r"\bcoming into being\b": "step by step",
    r"\bthe other way round\b": "say both ways",
    r"\bways? to think\b": "thinking method",
    r"\bwhat it says to the model\b": "its prompts",
    r"\b(blocks?|calls?|frames?|generation|jobs?|positions?|rows?|slot|step|tokens) at work\b": "active, running",
    r"\b(messages?|what is) under way\b": "pending, in transit",
    r"\bnobody (asks|asked|checks|knows|listens|needs|reads|sees|waits)\b": "say it in the passive: unread, unknown",
    r"\bthe step before\b": "the previous step",
    r"\bas \w+ as can be\b": "as ... as possible",
    r"\blay(s|ing)? [^.]{1,60} out over\b": "distribute over",
    r"\bdealt out\b|\bdeals (\w+ ){0,6}out\b": "distribute",
    r"\bis no (module|number|integer|mixture)\b(?! \{)": "is not a",
    r"\bwhat (comes?|came) of\b|\bwhat it (comes?|came) to\b": "result, outcome",
    r"\b(has|with|is) no such[.;,]": "say what is missing",
    r"\b(lets?|by one look|than .{1,30}) expect\b": "expected",
    r"\bto another end\b": "differently",
}
#: Names that say how a value came about and not what it is.
NAMELESS = {"found", "made", "said", "told"}
#: Folders of the library whose words have been read aloud.
PLAIN = [path for path in LIBRARY if not is_kernel(path)]


@each(PLAIN)
def words_are_plain(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    hits = [
        f"line {number}: {match.group()!r} (write: {instead})"
        for riddle, instead in RIDDLES.items()
        if re.search(riddle, text)  # most are nowhere, which is seen sooner without a look at each line
        for number, line in enumerate(text.splitlines(), 1)
        for match in re.finditer(riddle, line)
    ]
    assert not hits, "; ".join(hits)


@each(PLAIN)
def names_are_things(path: Path) -> None:
    named = [n for n in nodes(path) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    lines = sorted({f"{name.id} (line {name.lineno})" for name in named if name.id in NAMELESS})
    assert not lines, f"name what the value is: {', '.join(lines)}"


@each(PLAIN)
def docstrings_begin_with_a_sentence(path: Path) -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in nodes(path) if isinstance(node, kinds)]
    odd = [text.splitlines()[0] for text in texts if re.match(r"(Of|And|Or|With|For|Where) ", text)]
    assert not odd, f"not a sentence with a verb: {odd}"


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_documents_are_plain(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    hits = {match.group() for riddle in RIDDLES for match in re.finditer(riddle, text)}
    assert not hits, hits


@pytest.mark.parametrize("path", sorted(RULES), ids=relative)
def test_house_rules(path: Path) -> None:
    for rule in RULES[path]:
        rule(path)
