"""A journal on a disk that is full, or whose file may not grow: what is complete stays, and the run goes on later."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from partsong.errors import OutputError
from partsong.reasoning import Journal, Line, Message, Run, ScriptedEngine

ASK = [Message("user", ("what is it",))]
#: Calls of a run, and letters of an answer: more than the disks below can hold.
CALLS, LONG = 64, 20_000

#: Runs until the journal cannot be written; prints how many calls were asked of the engine, how many results were
#: seen, and the error.
CHILD = """
import asyncio, resource, sys
from tests.reasoning.test_journal_full import calls
from partsong.errors import OutputError
path, limit = sys.argv[1], int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
seen, asked = [], []
try:
    asyncio.run(calls(path, seen, asked))
    print(len(asked), len(seen), "none")
except OutputError as error:
    print(len(asked), len(seen), error)
"""


async def calls(path: str | Path, seen: list[str], asked: list[str]) -> None:
    """Asks one question after the other; what was seen and what the engine was asked is noted."""

    def script(request: object, draw: object) -> Line:
        asked.append("")
        return Line(text="x" * LONG + str(len(asked)))

    with Journal(path) as journal:
        run = Run(ScriptedEngine(script), journal=journal)
        for number in range(CALLS):
            seen.append((await run.call(ASK, path=("call", str(number)))).text[:LONG])


def in_a_child(path: Path, limit: int = 0) -> tuple[int, int, str]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(limit)], capture_output=True, text=True, check=True
    )
    asked, seen, error = child.stdout.strip().split(" ", 2)
    return int(asked), int(seen), error


def check(path: Path, asked: int, seen: int, error: str) -> None:
    """What was seen is kept, nothing else, and the run goes on with the rest once there is room."""
    assert 0 < seen < CALLS and asked == seen + 1
    assert str(path) in error and "a completed call cannot be written" in error and "make room, run again" in error
    with Journal(path, replay=True) as journal:
        assert journal.completed == seen


def resumed(path: Path, kept: int) -> None:
    seen: list[str] = []
    asked: list[str] = []
    asyncio.run(calls(path, seen, asked))
    assert (len(seen), len(asked)) == (CALLS, CALLS - kept)
    assert set(seen) == {"x" * LONG}


@pytest.mark.skipif(sys.platform == "win32", reason="files there have no limit of their own")
def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    asked, seen, error = in_a_child(path, 300_000)
    check(path, asked, seen, error)
    resumed(path, seen)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root on Linux")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "j.db"
    asked, seen, error = in_a_child(path)
    assert "disk is full" in error or "disk I/O error" in error
    check(path, asked, seen, error)
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)  # room is made
    resumed(path, seen)


def test_a_disk_that_is_full_before_the_first_call(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(b"x" * 400 * 1024)
    with pytest.raises(OutputError, match=r"the journal cannot be opened: .*full"):
        Journal(small_disk / "j.db")
    (small_disk / "other").unlink()
    with Journal(small_disk / "j.db") as journal:
        assert journal.completed == 0


def test_a_database_that_may_have_no_more_pages(tmp_path: Path) -> None:
    """The error sqlite gives for a full disk, without needing one."""
    path = tmp_path / "j.db"
    seen: list[str] = []

    async def main() -> int:
        with Journal(path) as journal:
            journal._db.execute("PRAGMA max_page_count=60")
            run = Run(ScriptedEngine(lambda request, draw: Line(text="x" * LONG)), journal=journal, concurrency=4)
            with pytest.raises(OutputError, match=r"database or disk is full; make room, run again"):
                await gathered(run)
            return journal.completed

    async def gathered(run: Run) -> None:
        async with run.samples(ASK, CALLS, path=("s",)) as samples:
            async for _, completion in samples:
                seen.append(completion.text)

    kept = asyncio.run(main())
    # Calls that ended at the same time as the one that failed may be kept without having been seen.
    assert 0 < len(seen) <= kept < CALLS

    async def again() -> Run:
        with Journal(path) as journal:
            run = Run(ScriptedEngine(lambda request, draw: Line(text="x" * LONG)), journal=journal)
            await gathered(run)
            return run

    seen.clear()
    run = asyncio.run(again())
    assert seen == ["x" * LONG] * CALLS
    assert run.replayed == kept and len(run.graph.nodes) == CALLS
