"""Makes an anonymous copy of a result, for a stranger to attach to an issue."""

from __future__ import annotations

import getpass
import json
import re
import socket
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.outputs import write_json

__all__ = ["anonymous", "share"]

#: What is kept: facts on which results depend, and none that tell whose they are.
_FACTS = ("partsong", "python", "system", "cores", "instruction_set", "packages", "gpus", "driver", "distributed")
_ROW = ("stage", "check", "value", "expected", "ok")
#: Paths and addresses; a slash within a word, as in GB/s, is none.
_HIDDEN = (
    (re.compile(r"(?<![\w<])(?:[A-Za-z]:\\|~?/|\\\\)[^\s'\"<>|:,;()]+"), "<path>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<address>"),
)


def share(file: Path) -> dict[str, Any]:
    """Writes an anonymous copy beside a file that ``make gpu`` wrote, and returns it with its place as ``file``.

    Call it on the machine that was measured, whose names are then known, and left out.

    Raises:
        ArgumentError: the file cannot be read, or is none of ``make gpu``.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        facts = {name: result["machine"].get(name) for name in _FACTS}
        rows = [{name: row[name] for name in _ROW} for row in result["rows"]]
        seconds = {str(stage): float(spent) for stage, spent in result["seconds"].items()}
    except OSError as error:
        raise ArgumentError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{file} is no result of `make gpu`") from error
    copy = {"command": "gpu", "machine": facts, "seconds": seconds, "rows": rows}
    shared = file.with_name(f"{file.stem}-shared.json")
    return write_json(shared, _cleaned(copy)) | {"file": str(shared)}


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cleaned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    return anonymous(value) if isinstance(value, str) else value


def anonymous(text: str) -> str:
    """Leaves out paths, addresses, and the names of this machine and its user.

    Example:
        >>> anonymous("lost 10.0.0.7:29500 in /home/ada/run.py at 3 GB/s")
        'lost <address> in <path> at 3 GB/s'
    """
    for pattern, instead in _HIDDEN:
        text = pattern.sub(instead, text)
    for name, instead in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user need not have a name
        return ""
