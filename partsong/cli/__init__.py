"""The ``partsong`` command: parses, calls, prints.

Exit codes: 0 done, 1 a rank or the program failed, 2 the request cannot be carried out as asked (one line on standard
error says why), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import tyro

from partsong.cli.options import (
    Bench,
    Command,
    Demo,
    Env,
    Eval,
    EvalSuite,
    Image,
    List,
    Reasoning,
    Text,
    Think,
    Video,
)
from partsong.cli.ranks import is_main
from partsong.errors import DistributedError, OutputError, PartsongError
from partsong.outputs import check_writable, write_json

__all__ = ["main", "parse"]

#: Keys every JSON result has, whatever the command; null where they mean nothing.
COMMON_KEYS = ("command", "strategy", "nproc", "seed", "seconds", "out", "ledger")


#: By options: the module that carries a command out, the function that does, and the one that puts its result in words.
_COMMANDS: dict[type, tuple[str, str, str]] = {
    Image: ("image", "image", "summary"),
    Video: ("video", "video", "summary"),
    Text: ("text", "text", "summary"),
    Think: ("think", "think", "summary"),
    Eval: ("eval", "evaluate", "summary"),
    Reasoning: ("eval_reasoning", "evaluate", "summary"),
    Bench: ("bench", "bench", "summary"),
    Demo: ("demo", "demo", "summary"),
    Env: ("info", "show_env", "env_summary"),
    List: ("info", "show_list", "list_summary"),
}


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        args: the arguments; None takes those of the process.
    """
    options = parse(sys.argv[1:] if args is None else args)
    try:
        result = _run(options)
        if result and is_main():
            write_json(options.json, {**dict.fromkeys(COMMON_KEYS), **result})
    except PartsongError as error:
        if options.debug:
            raise
        _fail(str(error), 1 if isinstance(error, (DistributedError, OutputError)) else 2)
    except KeyboardInterrupt:
        kept = options.journal if isinstance(options, Think) else None
        _fail(
            f"interrupted; what was complete is in {kept}, and the same command goes on" if kept else "interrupted", 130
        )
    except BrokenPipeError:  # whoever reads the output has left, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes there
        sys.exit(1)
    sys.exit(0)


def _run(options: Any) -> dict[str, Any]:
    if options.json is not None and is_main():
        check_writable(options.json)
    name, call, tell = next(found for kind, found in _COMMANDS.items() if isinstance(options, kind))
    module = import_module(f"partsong.cli.{name}")
    result = getattr(module, call)(options)
    if result:  # ranks other than the first have none
        print(getattr(module, tell)(result))
    return result


def parse(args: Sequence[str]) -> Any:
    """The options of a command, one of the classes in `partsong.cli.options`.

    Exits with code 2 and one line on standard error when the arguments cannot be read, with 0 after ``--help``.
    """
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            made = tyro.cli(
                Command,  # type: ignore[arg-type]
                prog="partsong",
                description="Sample generative models with many workers at once, and measure what that changes.",
                args=list(args),
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
            )
        return made.suite if isinstance(made, EvalSuite) else made
    except SystemExit as error:
        if error.code in (0, None):
            raise
        _fail(_one_line(complaints.getvalue()), 2)


def _one_line(box: str) -> str:
    """The first paragraph of tyro's framed message."""
    rows = [row.strip("│ ") for row in box.splitlines() if not row.startswith(("╭", "╰"))]
    paragraph: list[str] = []
    for row in rows:
        if row.startswith("──") or (paragraph and not row):
            break
        paragraph.append(row)
    return " ".join(filter(None, paragraph)) + "; see --help"


def _fail(message: str, code: int) -> NoReturn:
    # Under torchrun every rank refuses a bad request alike, so one says it; a failure may be one rank's alone.
    if is_main() or code == 1:
        print(f"partsong: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
