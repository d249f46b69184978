"""All that is written from the code: ``python -m tests.tables`` writes it anew, in one go.

These are tables of documents, lists in the files of packages, the snapshot of public names, the steps of
tests/gpu_ready, and the page of the zoo with its samples.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.knobs import kebab
from partsong.parallel.text_only import TextOnly
from partsong.reasoning.strategies import STRATEGIES
from partsong.samplers.registry import BUILT_IN, use_when
from partsong.samplers.text import RULES
from partsong.serving.app import endpoints
from tests.features.page import with_page
from tests.support_page import support_part
from tests.version_sets import SETS, pins

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def strategy_table() -> str:
    """A row for each strategy: page, class, and its docstring's first sentence, "Use it when" and source."""
    lines = ["| strategy | class | what it does | use it when | source |", "|---|---|---|---|---|"]
    for kind in (row.strategy for row in BUILT_IN):
        what = re.sub(r"(\. Exact)?\.$", "", _first_line(kind)).replace("`", "")
        page, when = f"methods/{kebab(kind.__name__)}.md", use_when(kind).replace("`", "")
        lines.append(f"| [{kind.__name__}]({page}) | {kind().kind} | {what} | {when} | {_source(kind)} |")
    return "\n".join(lines) + "\n"


def rule_table() -> str:
    """A row for each rule of text: its name, and its docstring's first line and source."""
    lines = ["| rule | takes | source |", "|---|---|---|"]
    for name, kind in RULES.items():
        what = _first_line(kind).rstrip(".")
        what = what if what[1].isupper() else what[0].lower() + what[1:]
        lines.append(f"| `{name}` | {what} | {_source(kind)} |")
    return "\n".join(lines) + "\n"


def thinking_table() -> str:
    """A row for each thinking method: what its page's title and its table of cost say, in short."""
    lines = ["| method | idea | calls | critical path |", "|---|---|---|---|"]
    for name in STRATEGIES:
        text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
        cells = [text.splitlines()[0].partition(": ")[2]]
        for what in ("calls", "critical path"):
            row = re.search(rf"^\| {what} \| (.+?)([.:;] .*)? \|$", text, re.MULTILINE)
            assert row is not None, f"the page of {name} has no row {what!r} in its table of cost"
            cells.append(row[1])
        lines.append(f"| [{name}](methods/{name}.md) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def endpoint_table() -> str:
    """A row for each endpoint of the server: method and path, and its docstring's first line."""
    lines = ["| endpoint | what it does |", "|---|---|"]
    for how, answer in endpoints().items():
        lines.append(f"| {' or '.join(f'`{each}`' for each in how)} | {_first_line(answer).rstrip('.')} |")
    return "\n".join(lines) + "\n"


def version_table() -> str:
    """A row for each library that a reader may have already: its version in each set."""
    sets = [pins(file) for file in SETS.values()]
    lines = [f"| | {' | '.join(SETS)} |", "|---" * (1 + len(SETS)) + "|"]
    names = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "peft", "openai", "triton")
    lines += [f"| {name} | {' | '.join(versions[name] for versions in sets)} |" for name in names]
    return "\n".join(lines) + "\n"


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _source(kind: type) -> str:
    """The paper of a class, as its docstring says after "Source:"."""
    source = re.search(r"^Source: (.*?)(?=\n\n|\Z)", inspect.getdoc(kind) or "", re.DOTALL | re.MULTILINE)
    # What stands after the arXiv number is about the differences; the page has them.
    paper = re.sub(r"(\d{4}\.\d{5}).*", r"\1", source.group(1).replace("\n", " ")).strip("(). ") if source else ""
    return paper + ")" * (paper.count("(") - paper.count(")"))


def pictures_apart() -> list[str]:
    """The models of the zoo whose weights have a wheel of their own."""
    return [name for name, model in zoo.MODELS.items() if model.package == "partsong-zoo-pictures"]


#: Files with a part that is written, which stands between two lines: the first of them, the second, and the part.
PARTS: Mapping[Path, tuple[str, str, str]] = {
    DOCS / "strategies.md": ("<!-- strategies: begin -->\n", "<!-- strategies: end -->\n", strategy_table()),
    DOCS / "support.md": ("<!-- support: begin -->\n", "<!-- support: end -->\n", support_part()),
    DOCS / "text.md": ("<!-- rules: begin -->\n", "<!-- rules: end -->\n", rule_table()),
    DOCS / "thinking.md": ("<!-- strategies: begin -->\n", "<!-- strategies: end -->\n", thinking_table()),
    DOCS / "serve.md": ("<!-- endpoints: begin -->\n", "<!-- endpoints: end -->\n", endpoint_table()),
    DOCS / "gpu.md": ("<!-- versions: begin -->\n", "<!-- versions: end -->\n", version_table()),
    ROOT / "zoo" / "pyproject.toml": (
        "exclude = [\n",
        "]\n",
        "".join(f'    "partsong_zoo/weights/{name}",\n' for name in pictures_apart()),
    ),
    ROOT / "zoo" / "pictures" / "pyproject.toml": (
        "[tool.hatch.build.targets.wheel.force-include]\n",
        "",
        "".join(f'"../partsong_zoo/weights/{n}" = "partsong_zoo/weights/{n}"\n' for n in pictures_apart()),
    ),
}


def with_part(text: str, begin: str, end: str, part: str) -> str:
    """A text with what stands between two lines replaced; an empty second line is the end of the text."""
    before, found, rest = text.partition(begin)
    assert found, f"there is no line {begin!r}"
    return f"{before}{begin}{part}{end}{rest.partition(end)[2] if end else ''}"


def documents() -> dict[Path, str]:
    """What every document and list that is written from the code should say."""
    drawing = (row.strategy for row in BUILT_IN if not issubclass(row.strategy, TextOnly))
    names = "".join(f"{kebab(kind.__name__)}\n" for kind in drawing)
    whole = {
        DOCS / "with.md": with_page(),
        ROOT / "integrations" / "comfyui" / "strategies.txt": names,
    }
    return whole | {path: with_part(path.read_text(encoding="utf-8"), *part) for path, part in PARTS.items()}


def main() -> None:
    """Writes everything; what takes long, samples and steps, only where it is missing."""
    from tests import test_public_api, zoo_page, zoo_samples
    from tests.gpu_ready import table as steps

    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
    test_public_api.write()
    zoo_samples.main(zoo_samples.missing())
    zoo_page.write()
    steps.write_missing()


if __name__ == "__main__":
    main()
