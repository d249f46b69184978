"""Writes the pages of the site that are made when it is built: a reference, and files from outside docs/.

Pages that people read on the repository's own site stay free of a site builder's directives, so those live here.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
#: Files of the repository that the site shows, as patterns.
SHOWN = (
    "*.md",
    "benchmarks/**/*.md",
    "recipes/**/*.md",
    "zoo/recipes/*.md",
    "integrations/*/README.md",
    "zoo/partsong_zoo/weights/*/README.md",
)
#: Packages whose public names are listed, in this order; a name that an earlier one has is not listed again.
PACKAGES = (
    "partsong",
    "partsong.parallel",
    "partsong.samplers",
    "partsong.samplers.text",
    "partsong.reasoning",
    "partsong.reasoning.strategies",
    "partsong.reasoning.threads",
    "partsong.planner",
    "partsong.kernels",
    "partsong.zoo",
)
#: What a model card says to programs, before its text.
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")
#: A whole link, with its text.
PLAIN_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def write(folder: Path) -> None:
    """Writes all generated pages into a folder of the documentation."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in shown():
        page = folder / path.relative_to(ROOT)
        # Most of them are in no list: links lead there.
        text = FRONT_MATTER.sub("", path.read_text(encoding="utf-8"))
        _put(page, f"---\norphan: true\n---\n\n{turned(text, path.parent, page.parent)}")
    _put(folder / "api" / "index.md", _listing("Reference of public names", [f"{name}" for name in PACKAGES]))
    seen: set[int] = set()
    for name in PACKAGES:
        _put(folder / "api" / f"{name}.md", _reference(name, seen))
    _put(folder / "methods" / "images.md", _listing("Images and videos", _method_pages(of_images=True)))
    _put(folder / "methods" / "thinking.md", _listing("Thinking", _method_pages(of_images=False)))
    notebooks = sorted((HERE / "notebooks").glob("*.ipynb"))
    for path in notebooks:
        _put(folder / "notebooks" / f"{path.stem}.md", _notebook(path))
    _put(folder / "notebooks" / "index.md", _listing("Notebooks", [path.stem for path in notebooks]))


def shown() -> list[Path]:
    """Lists the files from outside docs/ that become pages."""
    return sorted(path for pattern in SHOWN for path in ROOT.glob(pattern))


def turned(text: str, origin: Path, target: Path) -> str:
    """Rewrites the links of a text that moves from one folder to another.

    Links to files that the site shows as pages of its own lead to these pages.
    """
    outside = set(shown())

    def turn(match: re.Match[str]) -> str:
        opening, link, rest = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match.group()
        path = (origin / link).resolve()
        if path in outside:
            path = HERE / "_generated" / path.relative_to(ROOT)
        elif path.suffix == ".ipynb":
            path = HERE / "_generated" / "notebooks" / f"{path.stem}.md"
        return f"{opening}{Path(os.path.relpath(path, target)).as_posix()}{rest}"

    return LINK.sub(turn, text)


def turn_links(app: Any, page: str, source: list[str]) -> None:
    """Rewrites the links of a page as it is read."""
    if not page.startswith("_generated/"):
        folder = (HERE / page).parent
        source[0] = turned(source[0], folder, folder)


def hub_names() -> str:
    """Returns what the finder of models must know beside the page, as JavaScript: the classes of published models."""
    from partsong.planner import MODELS

    names = {text: row.denoiser for name, row in MODELS.items() for text in (name, row.checkpoint)}
    return f"const hubNames = {json.dumps(names)};"


def write_llms(app: Any, exception: Exception | None) -> None:
    """Writes llms.txt: what the project is and where its pages are, in plain text."""
    if exception is not None or app.builder.format != "html":
        return
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    summary = " ".join(readme.split("\n\n")[1].split())
    lines = ["# partsong", "", f"> {summary}"]
    for line in (HERE / "README.md").read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| \[([^\]]+)\]\(([^)]+\.md)\) \| (.*) \|$", line)
        if line.startswith("## "):
            lines += ["", line, ""]
        elif row:
            page = turned(f"]({row[2]})", HERE, HERE)[2:-1]
            words = PLAIN_LINK.sub(r"\1", row[3])
            lines.append(f"- [{row[1]}](_sources/{page}.txt): {words}")
    lines += ["", "## Public names", ""]
    lines += [f"- [{name}](_generated/api/{name}.html)" for name in PACKAGES]
    _put(Path(app.outdir) / "llms.txt", "\n".join(lines))


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n", encoding="utf-8")


def _listing(title: str, pages: list[str]) -> str:
    return "\n".join([f"# {title}", "", "```{toctree}", ":maxdepth: 1", "", *pages, "```"])


def _method_pages(*, of_images: bool) -> list[str]:
    from partsong.samplers.registry import strategies

    pages = sorted(path.stem for path in (HERE / "methods").glob("*.md"))
    names = set(strategies())
    return [f"../../methods/{page}" for page in pages if (page in names) == of_images]


def _reference(name: str, seen: set[int]) -> str:
    module = import_module(name)
    lines = [f"# `{name}`", "", "```{eval-rst}", f".. automodule:: {name}", "   :no-members:", ""]
    for public in sorted(module.__all__, key=str.lower):
        value = getattr(module, public)
        if id(value) in seen or inspect.ismodule(value):
            continue
        seen.add(id(value))
        lines += _entry(f"{name}.{public}", value)
    return "\n".join([*lines, "```"])


def _entry(name: str, value: Any) -> list[str]:
    """Returns the directive for a public name; of a mapping or a tuple, it says what is in it."""
    if inspect.isclass(value) or callable(value):
        return [f".. {'autoclass' if inspect.isclass(value) else 'autofunction'}:: {name}", ""]
    if not isinstance(value, Iterable):  # a name for several types
        return [f".. py:data:: {name}", "", f"   Is ``{value}``.", ""]
    entries = [getattr(getattr(each, "func", each), "__name__", str(each)) for each in value]
    return [f".. py:data:: {name}", "", f"   Has entries for {', '.join(f'``{each}``' for each in entries)}.", ""]


def _notebook(path: Path) -> str:
    """Returns a notebook as a page: its texts, its code, and what its cells printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(turned(text, path.parent, HERE / "_generated" / "notebooks"))
            continue
        parts.append(f"```python\n{text}\n```")
        printed = "".join("".join(output.get("text", [])) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts)
