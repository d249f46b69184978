"""Reads the documents of the repository: their words, blocks, links and commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What the site's builder wrote is not kept, and not read here.
MADE = "_generated"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for path in (ROOT / "docs").rglob("*.md") if MADE not in path.parts),
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "recipes").glob("*.md"),
        ROOT / "zoo" / "README.md",
        ROOT / "zoo" / "recipes" / "README.md",
        *(ROOT / "integrations").rglob("*.md"),
    ]
)
#: Pages that people read from top to bottom; the list of changes is looked things up in.
READ = [path for path in PAGES if path.parts[-2] != "recipes" and path.name != "CHANGELOG.md"]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    """Returns a page's path within the repository."""
    return path.relative_to(ROOT).as_posix()


def commands(text: str) -> list[list[str]]:
    """Returns the arguments of every ``partsong`` command in fenced blocks and inline code."""
    lines = [line for _, body in FENCE.findall(text) for line in body.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(partsong (?:image|demo|bench|list|env)[^`]*)`", FENCE.sub("", text))
    found = [line[line.index("partsong ") :] for line in lines if re.search(r"(^|-m )partsong \w", line)]
    return [shlex.split(line, comments=True)[1:] for line in found]


def examples(path: Path) -> list[str]:
    """Returns the Python blocks of a page."""
    return [body for language, body in FENCE.findall(path.read_text(encoding="utf-8")) if language == "python"]


def words(text: str) -> int:
    """Counts words, those of code and tables included, but not signs and the targets of links."""
    text = re.sub(r"^\[[^\]]+\]: .*$", "", text, flags=re.MULTILINE)
    return sum(bool(re.search(r"\w", word)) for word in re.sub(r"\]\([^)]*\)", "]", text).split())


def sentences(text: str) -> list[str]:
    """Returns the sentences of running text: no code, no tables, no headings, list items one by one."""
    text = FENCE.sub("\n\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    lines = ["" if re.match(r"\s*(\||#|>|!\[)", line) else line for line in text.splitlines()]
    lines = [re.sub(r"^\s*([-*]|\d+\.)\s+", "\n", line) for line in lines]
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    plain = [re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", block)).replace("\n", " ") for block in blocks]
    return [each.strip() for block in plain for each in re.split(r"(?<=[.!?])[\"*)]*\s+", block) if each.strip()]
