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
    match options:
        case Image():
            return _image(options)
        case Video():
            return _video(options)
        case Text():
            return _text(options)
        case Think():
            return _think(options)
        case Eval():
            return _eval(options)
        case Reasoning():
            return _reasoning(options)
        case Bench():
            return _bench(options)
        case Demo():
            return _demo(options)
        case Env():
            return _env()
        case List():
            return _list(options)
    raise AssertionError(options)


def _image(options: Image) -> dict[str, Any]:
    from partsong.cli.image import image, summary

    result = image(options)
    if result:
        print(summary(result))
    return result


def _video(options: Video) -> dict[str, Any]:
    from partsong.cli.video import summary, video

    result = video(options)
    if result:
        print(summary(result))
    return result


def _text(options: Text) -> dict[str, Any]:
    from partsong.cli.text import summary, text

    result = text(options)
    print(summary(result))
    return result


def _think(options: Think) -> dict[str, Any]:
    from partsong.cli.think import summary, think

    result = think(options)
    print(summary(result))
    return result


def _reasoning(options: Reasoning) -> dict[str, Any]:
    from partsong.cli.eval_reasoning import evaluate_reasoning, reasoning_summary

    result = evaluate_reasoning(options)
    print(reasoning_summary(result))
    return result


def _eval(options: Eval) -> dict[str, Any]:
    from partsong.cli.eval import evaluate, summary

    result = evaluate(options)
    print(summary(result))
    return result


def _bench(options: Bench) -> dict[str, Any]:
    from partsong.cli.bench import bench, summary

    result = bench(options)
    print(summary(result))
    return result


def _demo(options: Demo) -> dict[str, Any]:
    from partsong.cli.demo import demo

    result = demo(options)
    print(f"open this page in a browser: {result['out']}")
    return result


def _env() -> dict[str, Any]:
    from partsong.cli.info import env

    result = env()
    for name, value in result.items():
        if name == "attention":
            value = "".join(f"\n  {row['name']}: {row['reason'] or 'usable'}" for row in value)
        elif name == "packages":
            value = ", ".join(f"{package} {number}" for package, number in value.items() if number)
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        if name != "command":
            print(f"{name}: {value}")
    return result


def _list(options: List) -> dict[str, Any]:
    from partsong.cli.info import list_rows, table

    rows = list_rows(options)
    print(table(rows) if rows else f"no {options.what} in this version")
    return {"command": "list", "what": options.what, "rows": rows}


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
