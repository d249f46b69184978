"""The tables of documents that are made from the code; ``python -m tests.tables`` writes all of them anew."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from partsong.samplers.registry import BUILT_IN, use_when
from tests.features.page import with_page
from tests.support_page import support_page

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "docs" / "support.md"
WITH = ROOT / "docs" / "with.md"
#: Documents with a table of strategies, and where the pages of these lie from there.
INDEXES = {ROOT / "docs" / "strategies.md": "methods"}
BEGIN, END = "<!-- strategies: begin -->\n", "<!-- strategies: end -->\n"


def strategy_table(pages: str) -> str:
    """A row for each strategy: page, class, and its docstring's first sentence, "Use it when" and source."""
    lines = ["| strategy | class | what it does | use it when | source |", "|---|---|---|---|---|"]
    for name, kind in ((page_name(row.strategy), row.strategy) for row in BUILT_IN):
        text = inspect.getdoc(kind) or ""
        what = re.sub(r"(\. Exact)?\.$", "", text.splitlines()[0]).replace("`", "")
        source = re.search(r"^Source: (.*?)(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
        # What stands after the arXiv number is about the differences; the page has them.
        paper = re.sub(r"(\d{4}\.\d{5}).*", r"\1", source.group(1).replace("\n", " ")).strip("(). ") if source else ""
        paper += ")" * (paper.count("(") - paper.count(")"))
        when = use_when(kind).replace("`", "")
        lines.append(f"| [{kind.__name__}]({pages}/{name}.md) | {kind().kind} | {what} | {when} | {paper} |")
    return "\n".join(lines) + "\n"


def page_name(kind: type) -> str:
    """The kebab-case name of a class."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind.__name__).lower()


def with_table(text: str, table: str) -> str:
    """A document with its table of strategies replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}"


def documents() -> dict[Path, str]:
    """What every document with such a table should say."""
    tables = {
        path: with_table(path.read_text(encoding="utf-8"), strategy_table(pages)) for path, pages in INDEXES.items()
    }
    return {SUPPORT: support_page(), WITH: with_page(), **tables}


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
