"""Follows README.md as a newcomer does: ``python benchmarks/startup/newcomer.py``.

In an empty folder it clones the repository, makes a virtual environment, and runs the commands and Python examples of
README.md from top to bottom as they are printed. A server is left running, asked for a picture, and stopped. Writes a
result with each command, its seconds and the first lines of what it printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.filing import file_result, markdown_table, result_path

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: A line that shows how far something is, and is drawn again and again.
BAR = re.compile(r"\d%\|")
#: Lines in which pip says where this machine gets its packages.
OWN = re.compile(r"Looking in|WARNING: Location|Processing |^\s*Link requires|file://")
REQUEST = {"model": "shapes", "prompt": "a red circle left of a blue square", "size": "64x64"}
#: Steps that need what most machines lack, by a part of their text, and why they are not run.
NOT_RUN = {
    "Tongyi-MAI/Z-Image-Turbo": "needs a model of 21 GB and two GPUs",
    "make test ": "takes a quarter of an hour by itself",
}
#: What README's table of extras says to install before a command.
NEEDS = {"partsong serve": "pip install '.[serve]'"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to follow."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    readme: Path = ROOT / "README.md"
    """The page that is followed."""
    source: str = str(ROOT)
    """What is cloned: a folder or an address."""
    python: str = "python3"
    """The interpreter of the new environment."""
    only: list[str] = field(default_factory=list)
    """Run only steps with one of these texts in them; empty runs all."""
    environment: Path | None = None
    """Folder of an environment that has partsong: nothing is cloned, made or installed then."""
    constraints: bool = False
    """Hold packages at the versions of constraints.txt, as `make` does."""
    lines: int = 6
    """How many lines of what a command printed are kept."""
    timeout: float = 1800.0
    """Seconds that a step may take."""


@dataclass(frozen=True, slots=True)
class PageStep:
    """Describes a newcomer's next step.

    Attributes:
        kind: a command, a Python example, a server that is left running, or a request to it.
        text: as it is printed.
        origin: where it is written.
    """

    kind: Literal["command", "python", "server", "request"]
    text: str
    origin: str = "README.md"


def steps_of(readme: str) -> list[PageStep]:
    """Returns the steps of a page: every command line and every Python block, in their order.

    Blocks with the language ``text`` show what is printed. An extra is installed before the command that needs it.
    """
    steps: list[PageStep] = []
    for language, body in FENCE.findall(readme):
        if language == "python":
            steps.append(PageStep("python", body))
        if language not in ("", "bash", "sh"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            if not line.strip():
                continue
            needed = next((extra for command, extra in NEEDS.items() if line.startswith(command)), None)
            if needed is not None:
                steps.append(PageStep("command", needed, "README.md, table of extras"))
            is_server = line.startswith("partsong serve")
            steps.append(PageStep("server" if is_server else "command", line))
            if is_server:
                steps.append(
                    PageStep("request", f"POST {URL}/v1/images/generations {json.dumps(REQUEST)}", "docs/serve.md")
                )
    return steps


def setting_up(config: Config) -> list[PageStep]:
    """Returns what comes before the page's own steps."""
    clone = PageStep("command", f"git clone --quiet {config.source} partsong", "the repository's own page")
    return [clone, PageStep("command", f"{config.python} -m venv venv && cd partsong", "habit")]


def reason_not_to_run(step: PageStep, config: Config) -> str | None:
    """Says why a step is left out; None where it is not."""
    if config.only and not any(text in step.text for text in config.only):
        return "not asked for"
    if config.environment is not None and ("pip install" in step.text or step.origin == "habit"):
        return "an environment was given"
    return next((reason for text, reason in NOT_RUN.items() if text in step.text), None)


class Follower:
    """Runs steps in a folder, in an environment whose programs come first on the path."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        programs = (folder / "venv" if config.environment is None else config.environment.absolute()) / "bin"
        self.variables = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        self.variables |= {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        if config.constraints:
            self.variables["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
        self.server: subprocess.Popen[str] | None = None

    @property
    def place(self) -> Path:
        """Returns the folder that commands run in: the clone, once it is there."""
        clone = self.folder / "partsong"
        return clone if clone.is_dir() else self.folder

    def run(self, step: PageStep, number: int) -> dict[str, Any]:
        """Runs a step and returns its row."""
        text = step.text.rstrip().replace(self.config.source, "ADDRESS")
        row = {"number": number, "kind": step.kind, "origin": step.origin, "text": text}
        reason = reason_not_to_run(step, self.config)
        if reason is None and step.kind == "request" and self.server is None:
            reason = "no server runs"
        if reason is not None:
            return {**row, "seconds": None, "code": None, "not_run": reason, "printed": []}
        begin = time.perf_counter()
        code, printed = {"server": self._serve, "request": self._ask}.get(step.kind, self._command)(step, number)
        seconds = time.perf_counter() - begin
        shown = (line for line in printed.splitlines() if line.strip() and not (BAR.search(line) or OWN.search(line)))
        lines = [line[:160].rstrip() for line in shown][: self.config.lines]
        return {**row, "seconds": seconds, "code": code, "not_run": None, "printed": lines}

    def _command(self, step: PageStep, number: int) -> tuple[int, str]:
        command = ["bash", "-c", step.text]
        if step.kind == "python":
            script = self.folder / f"example-{number}.py"
            script.write_text(step.text, encoding="utf-8")
            command = ["python", str(script)]
        # Into a file: a process that a command leaves running would hold a pipe open.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
            kept = {"stdout": printed, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            try:
                done = subprocess.run(
                    command, cwd=self.place, env=self.variables, timeout=self.config.timeout, check=False, **kept
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = 124
            printed.seek(0)
            return code, printed.read()

    def _serve(self, step: PageStep, number: int) -> tuple[int, str]:
        log = self.folder / f"server-{number}.log"
        with log.open("w", encoding="utf-8") as printed:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {step.text}"],
                cwd=self.place,
                env=self.variables,
                stdout=printed,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        until = time.monotonic() + self.config.timeout
        while self.server.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{URL}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return 0, log.read_text(encoding="utf-8", errors="replace")
            time.sleep(0.2)
        code = self.server.poll()
        self.stop()
        return 124 if code is None else code, log.read_text(encoding="utf-8", errors="replace")

    def _ask(self, step: PageStep, number: int) -> tuple[int, str]:
        _, url, body = step.text.split(" ", 2)
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.config.timeout) as answer:
                return 0, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")

    def stop(self) -> None:
        """Stops the server, as somebody does with Ctrl-C."""
        if self.server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGINT)
            try:
                self.server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.server.pid, signal.SIGKILL)
                self.server.wait()
            self.server = None


def follow(config: Config, folder: Path) -> Iterator[dict[str, Any]]:
    """Runs all steps in a folder, and yields a row for each."""
    steps = steps_of(config.readme.read_text(encoding="utf-8"))
    if config.environment is None:
        steps = [*setting_up(config), *steps]
    follower = Follower(config, folder)
    try:
        for number, step in enumerate(steps, 1):
            row = follower.run(step, number)
            print(f"{number}: {row['not_run'] or row['code']} | {step.text.splitlines()[0]}", file=sys.stderr)
            yield row
    finally:
        follower.stop()


def main(config: Config) -> None:
    """Follows the page and writes the files."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        rows = list(follow(config, Path(folder)))
    ran = [row for row in rows if row["not_run"] is None]
    failed = [row for row in ran if row["code"] != 0]
    note = (
        f"An empty folder, a clone, and README.md from top to bottom: {len(ran)} of {len(rows)} steps were run in "
        f"{sum(row['seconds'] for row in ran):.0f} s, and {len(failed)} failed. Python examples are files that the new "
        "environment's Python runs. A step without seconds was not run, for the reason beside it."
    )
    title, table = "A newcomer follows README.md", _table(rows)
    file_result(config.out, __file__, rows, title, note, table)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            row["number"],
            _cell(row["text"].splitlines()[0] + (" ..." if "\n" in row["text"] else "")),
            "" if row["seconds"] is None else f"{row['seconds']:.1f}",
            "" if row["code"] is None else row["code"],
            row["not_run"] or "<br>".join(_cell(line) for line in row["printed"]),
        )
        for row in rows
    ]
    return markdown_table(("step", "as printed", "s", "exit", "first lines"), lines)


def _cell(text: str) -> str:
    plain = text.replace("|", "\\|").replace("`", "'")
    return f"`{plain}`" if plain else ""


if __name__ == "__main__":
    main(tyro.cli(Config))
