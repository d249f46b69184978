"""Runs the cells of a notebook in one process, and keeps what they printed; ``python -m tests.notebooks`` writes it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.documents import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def run_cells(notebook: dict[str, Any], folder: Path) -> list[str]:
    """Runs the code cells one after another, in a folder, and returns what each printed.

    A last line that is an expression is printed, as notebooks show it.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    texts = []
    with contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                _run_cell("".join(cell["source"]), names)
            texts.append(printed.getvalue())
    return texts


def _run_cell(source: str, names: dict[str, Any]) -> None:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if value is not None:
            print(repr(value))


def with_outputs(notebook: dict[str, Any], texts: list[str]) -> str:
    """Returns a notebook's file with what its cells printed."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, texts, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = number, [stream] if text else []
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(["", str(ROOT)])  # ranks find the module that a cell wrote, and partsong
    for path in NOTEBOOKS if len(sys.argv) < 2 else map(Path, sys.argv[1:]):
        content = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as temporary:
            path.write_text(with_outputs(content, run_cells(content, Path(temporary))), encoding="utf-8")
