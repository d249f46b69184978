"""Runs programs that a model wrote: defines runners, with one that confines programs to a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from partsong.errors import UnsupportedError
from partsong.knobs import AboveZero, Count, check_fields

__all__ = ["Runner", "Sandbox", "SandboxOutcome"]

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MB = 1 << 20
#: Exit code of the child where it cannot isolate the program.
_REFUSED = 125


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOutcome:
    """Describes how a program ended.

    Attributes:
        passed: whether it ended by itself with exit code 0.
        output: what it wrote to both streams, in order; the middle is left out where it is long.
        reason: "exit", or "timeout" where it was killed.
        code: exit code; None after a timeout.
    """

    passed: bool
    output: str
    reason: str = "exit"
    code: int | None = 0

    @property
    def report(self) -> str:
        """Returns a report for a model to read."""
        if self.reason == "timeout":
            return f"It did not end in time.\n{self.output}".rstrip()
        return f"Exit code {self.code}.\n{self.output}".rstrip()


class Runner(Protocol):
    """Runs programs; a strategy that needs a runner has to be given one."""

    async def run(self, program: str) -> SandboxOutcome:
        """Runs a program from beginning to end.

        The same program should give the same outcome: its output becomes part of prompts, and a prompt that differs
        is another call.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sandbox:
    r"""Runs Python programs, each in a process group and a temporary folder of its own, on Linux.

    With `isolate`, a program has no network, cannot signal other processes, leaves no child process behind, and writes
    files only below its folder. It can still read what the user can read, and shares the kernel: for malicious
    programs, use a virtual machine.

    Attributes:
        seconds: seconds of wall time; then the whole group is killed.
        cpu_seconds: whole seconds of CPU time.
        memory_mb: megabytes of address space of each process.
        file_mb: megabytes of each file, also of the output.
        processes: most processes and threads; does not bind the superuser.
        output_chars: characters of output that are kept.
        isolate: whether to use namespaces and Landlock as above; a machine that does not allow them is refused.
        python: path of the interpreter; None is the one that runs.

    >>> asyncio.run(Sandbox(isolate=False).run("print(6 * 7)")).output
    '42\n'
    """

    seconds: AboveZero = 10.0
    cpu_seconds: Count = 10
    memory_mb: Count = 512
    file_mb: Count = 16
    processes: Count = 64
    output_chars: Count = 4000
    isolate: bool = True
    python: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(f"the sandbox needs Linux, this is {sys.platform}; give a runner of your own")

    async def check(self) -> None:
        """Tests whether this machine allows what `isolate` needs.

        Raises:
            UnsupportedError: it does not.
        """
        with tempfile.TemporaryDirectory(prefix="partsong-") as folder:
            code, output = await self._spawn(Path(folder), [])
        if code != 0:
            raise UnsupportedError(
                f"this machine does not allow programs to be isolated ({output.strip()}); allow user namespaces and "
                "Landlock, run inside a container with Sandbox(isolate=False), or give a runner of your own"
            )

    async def run(self, program: str) -> SandboxOutcome:
        """Runs a Python program; see `Runner`.

        Raises:
            UnsupportedError: the program cannot be isolated here.
        """
        with tempfile.TemporaryDirectory(prefix="partsong-") as folder:
            work = Path(folder) / "work"
            work.mkdir()
            (work / "program.py").write_text(program, encoding="utf-8")
            command = [self.python or sys.executable, "-s", "-P", "-B", "program.py"]
            code, output = await self._spawn(Path(folder), command)
            # Paths differ from run to run, and prompts must not.
            output = self._shorten(output.replace(f"{work}{os.sep}", ""))
        if self.isolate and code == _REFUSED:  # a program may also exit with this code
            await self.check()
        if code is None:
            return SandboxOutcome(passed=False, output=output, reason="timeout", code=None)
        return SandboxOutcome(passed=code == 0, output=output, code=code)

    async def _spawn(self, folder: Path, command: list[str]) -> tuple[int | None, str]:
        """Runs a command; returns its exit code, None after a timeout, and its output. It leaves no process behind."""
        work = folder / "work"
        work.mkdir(exist_ok=True)
        limits = [int(self.isolate), self.cpu_seconds, self.memory_mb * _MB, self.file_mb * _MB, self.processes]
        arguments = [sys.executable, "-I", "-S", str(_CHILD), *map(str, limits), str(work), *command]
        # Hashes are seeded, so that sets have the same order each time.
        known = {"PATH": os.defpath, "HOME": str(work), "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        with (folder / "output").open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                cwd=work,
                env=known,
                start_new_session=True,
            )
            try:
                code = await asyncio.wait_for(child.wait(), self.seconds)
            except TimeoutError:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
        with (folder / "output").open("rb") as file:
            text = file.read(8 * self.output_chars + _MB).decode("utf-8", "replace")
        return code, text

    def _shorten(self, text: str) -> str:
        if len(text) <= self.output_chars:
            return text
        half = self.output_chars // 2
        return f"{text[:half]}\n[...]\n{text[-half:]}"
