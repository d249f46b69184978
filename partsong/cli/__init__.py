"""Runs the ``partsong`` command: parses, calls, prints.

Exit codes: 0 done, 1 a rank or the program failed, 2 the request cannot be carried out as asked (one line on standard
error says why), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import tyro

from partsong import zoo
from partsong.cli.bounds import check_bounds
from partsong.cli.commands import COMMANDS, Command
from partsong.cli.options import (
    Bench,
    Calibrating,
    Demo,
    Env,
    Image,
    List,
    Planning,
    ServeCheck,
    Serving,
    Text,
    Think,
    Video,
)
from partsong.cli.ranks import is_main
from partsong.cli.suites.options import Eval, EvalSuite, PlannerEval, Promises, Reasoning
from partsong.cli.suites.picture_options import PictureEval, VideoEval
from partsong.errors import DistributedError, NotANumberError, OutputError, PartsongError
from partsong.foreign_messages import hide_foreign_messages
from partsong.garbage import collect_later
from partsong.knobs import did_you_mean
from partsong.left_out_libraries import leave_out
from partsong.outputs import check_writable, write_json
from partsong.whole_text import whole_json

__all__ = ["main", "parse"]

#: Options that are text for a model, or a list of such texts.
_TEXTS = ("negative_prompt", "prompt", "question", "template")
#: Errors of a run that was asked for rightly.
_FAILURES = (DistributedError, NotANumberError, OutputError)

#: Keys that the JSON result of every command has; null where a command has no such value.
COMMON_KEYS = ("command", "strategy", "nproc", "seed", "seconds", "out", "ledger")


#: Schedulers of diffusers that compute with scipy, themselves or by torchsde; others import it where it is there.
_NEEDS_SCIPY = re.compile(rb'"use_beta_sigmas": *true|"LMSDiscrete|"DPMSolverSDE|"CosineDPMSolver')
#: For each class of options: the module of the command, and its functions that run it and describe its result.
_COMMANDS: dict[type, tuple[str, str, str]] = {
    Image: ("image", "image", "summary"),
    Video: ("video", "video", "summary"),
    Text: ("text", "text", "summary"),
    Think: ("think", "think", "summary"),
    Eval: ("eval", "evaluate", "summary"),
    Reasoning: ("suites.reasoning", "evaluate", "summary"),
    Promises: ("suites.promises", "evaluate", "summary"),
    PictureEval: ("suites.pictures", "evaluate_images", "summary"),
    VideoEval: ("suites.pictures", "evaluate_videos", "summary"),
    Bench: ("bench", "bench", "summary"),
    PlannerEval: ("plan", "evaluate", "evaluate_summary"),
    Planning: ("plan", "plan", "plan_summary"),
    Calibrating: ("plan", "calibrate", "calibrate_summary"),
    Serving: ("serve", "serve", "summary"),
    ServeCheck: ("serve_check", "check", "summary"),
    Demo: ("demo", "demo", "summary"),
    Env: ("info", "show_env", "env_summary"),
    List: ("info", "show_list", "list_summary"),
}


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    Args:
        args: the arguments; None takes those of the process.
    """
    options = None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name of a file need not be text, nor a terminal write all
    try:
        options = parse(sys.argv[1:] if args is None else args)
        if args is None:
            if not options.debug:
                hide_foreign_messages()
            _start_sooner(options)
        result = _run(options)
        if result and is_main():
            write_json(options.json, {**dict.fromkeys(COMMON_KEYS), **result})
    except PartsongError as error:
        if options is not None and options.debug:
            raise
        _fail(str(error), 1 if isinstance(error, _FAILURES) else 2)
    except KeyboardInterrupt:
        message = "interrupted"
        if isinstance(options, Think) and options.journal is not None:
            message += f"; completed calls are in {options.journal}; run the same command to continue"
        _fail(message, 130)
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest of the output is dropped
        sys.exit(1)
    # A question counts as failed where there is neither an answer nor a text.
    sys.exit(0 if result.get("answer", "") is not None or result.get("text", "").strip() else 1)


def _start_sooner(options: Any) -> None:
    """Leaves out what neither this process, which ends with the command, nor its ranks will need while they import.

    A plan leaves little garbage and ends soon; jobs turn its collection on again when they have imported everything.
    """
    if not isinstance(options, (Planning, Image, Video)):
        return
    collect_later()
    named = options.model or ""  # without one, `plan` reads the settings of published models
    folder = zoo.MODELS[named].folder if named in zoo.MODELS else Path(named) if named else None
    folder = folder if folder is not None and folder.is_dir() else None
    if folder is not None:
        # diffusers imports them for adapters and quantised weights, where it can.
        if next(folder.rglob("adapter_config.json"), None) is None:
            leave_out("peft")
        if not any(b"quantization_config" in file.read_bytes() for file in folder.rglob("config.json")):
            leave_out("torchao")
        if not any(_NEEDS_SCIPY.search(file.read_bytes()) for file in folder.rglob("scheduler_config.json")):
            leave_out("scipy", "sklearn")  # the second needs the first
    elif folder is None and isinstance(options, Planning):
        # Only the configuration of a published model is read.
        leave_out("accelerate", "peft", "scipy", "transformers")


def _run(options: Any) -> dict[str, Any]:
    check_bounds(options)
    if options.json is not None and is_main():
        check_writable(options.json)
    name, run, describe = next(row for kind, row in _COMMANDS.items() if isinstance(options, kind))
    module = import_module(f"partsong.cli.{name}")
    result = getattr(module, run)(options)
    if result:  # empty on ranks other than the first
        print(getattr(module, describe)(result))
    return result


def parse(args: Sequence[str]) -> Any:
    """Reads arguments into the options of a command, one of the classes in `partsong.cli.options`.

    Exits with code 2 and one line on standard error when the arguments cannot be read, with 0 after ``--help``.

    Raises:
        ArgumentError: a file of options cannot be read.
    """
    if list(args) == ["--version"]:
        from partsong import __version__

        print(f"partsong {__version__}")
        sys.exit(0)
    if list(args[:2]) == ["serve", "check"]:
        args = ["serve check", *args[2:]]  # to the parser it is another command
    options = _read(args)
    if isinstance(options, Serving) and options.config is not None:
        from partsong.cli.config_file import ConfigFile

        options = _read([args[0], *ConfigFile.read(options.config).arguments, *args[1:]])
    return _cleaned(options.suite if isinstance(options, EvalSuite) else options)


def _read(args: Sequence[str]) -> Any:
    complaints = io.StringIO()
    if {"-h", "--help"} & set(args):
        from partsong.cli.help_texts import explain

        explain(COMMANDS.values(), " ".join(takewhile(lambda word: not word.startswith("-"), args)).split())
    try:
        with contextlib.redirect_stderr(complaints):
            return tyro.cli(
                Command,  # type: ignore[arg-type]
                prog="partsong",
                description="Sample generative models with many workers at once, and measure what that changes.",
                args=list(args),
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as error:
        if error.code in (0, None):
            raise
        _fail(_one_line(complaints.getvalue()) + _hint(args), 2)


def _cleaned(options: Any) -> Any:
    """Cleans texts for models of half characters; names of files stay as they are."""
    given = {name: getattr(options, name, None) for name in _TEXTS}
    return replace(options, **{name: whole_json(value) for name, value in given.items() if value is not None})


def _hint(args: Sequence[str]) -> str:
    """Returns the command or the option that was probably meant, where an unknown one was given."""
    command, *more = args or [""]
    if command not in COMMANDS:
        return did_you_mean(command, COMMANDS)
    known = [f"--{field.name.replace('_', '-')}" for field in fields(COMMANDS[command])]
    given = [word.partition("=")[0].replace("_", "-") for word in more if word.startswith("--")]
    return next((did_you_mean(word, known) for word in given if word not in (*known, "--help")), "")


def _one_line(box: str) -> str:
    """Returns the first paragraph of tyro's framed message as one line."""
    rows = [row.strip("│ ") for row in box.splitlines() if not row.startswith(("╭", "╰"))]
    paragraph: list[str] = []
    for row in rows:
        if row.startswith("──") or (paragraph and not row):
            break
        paragraph.append(row)
    return " ".join(filter(None, paragraph)) + "; see --help"


def _fail(message: str, code: int) -> NoReturn:
    # Under torchrun every rank refuses a bad request, and one message is enough. Other failures may happen on one rank
    # only.
    if is_main() or code == 1:
        print(f"partsong: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
