"""Keeps completed calls on disk: a killed run can continue, and a finished one can be replayed without an engine.

SQLite in WAL mode: a completed call is durable before its result is returned, and several processes may share a file.
The order in which the calls of a run ended is kept with them. A method that stops early decides by that order, so a
replay returns the calls in it and decides the same. Calls that were cancelled, or ended by a budget, are kept for the
replay's report; a continued run makes them again.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from partsong.errors import ArgumentError, OutputError
from partsong.reasoning.calls.call import Completion, Request, Usage

__all__ = ["Entry", "Journal", "Past", "State"]

_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS calls (
    run TEXT NOT NULL, key TEXT NOT NULL, place INTEGER NOT NULL, state TEXT NOT NULL, start REAL NOT NULL,
    end REAL NOT NULL, request TEXT NOT NULL, completion TEXT NOT NULL, PRIMARY KEY (run, key)
) STRICT;
"""


#: The usage is NULL where the completion is no JSON.
_PAST = """
SELECT rowid, place, state, end, CASE WHEN json_valid(completion) THEN json_extract(completion, '$.usage') END
FROM calls WHERE run = ? ORDER BY place
"""
_FIND = "SELECT rowid, place, state, start, end, completion FROM calls WHERE run = ? AND key = ?"
_DAMAGED = "delete that row, whose call is then made again, or take another journal"

#: How a call ended: by itself, cancelled by the caller, or by the budget, possibly before it began.
State = Literal["complete", "cancelled", "budget"]


@dataclass(frozen=True, slots=True)
class Entry:
    """Describes how a call ended, at which place in the order of endings, and when, in seconds since the run began.

    If the budget ended the call, the text of its completion says what was spent.
    """

    place: int
    state: State
    start: float
    end: float
    completion: Completion


@dataclass(frozen=True, slots=True)
class Past:
    """Describes what a run has done so far: the places of its completed calls in order, and the usage of all begun."""

    places: Sequence[int] = ()
    next: int = 0
    seconds: float = 0.0
    usage: Sequence[Usage] = ()


class Journal:
    """Keeps completions by run and by the key of their request.

    Args:
        path: file of the journal. It and its folder are made where they do not exist.
        replay: whether to replay a run: then nothing is written, and no engine is asked.

    Raises:
        OutputError: the file cannot be opened or written.
        ArgumentError: the file is not a journal, or one of another version.
    """

    def __init__(self, path: str | Path, *, replay: bool = False) -> None:
        self.path, self.replay = Path(path), replay
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.AbstractEventLoop, list[tuple[tuple[Any, ...], asyncio.Future[None]]]] = {}
        if replay and not self.path.is_file():
            raise ArgumentError(f"{self.path} is not there, so there is nothing to replay")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise
        except (OSError, sqlite3.OperationalError) as error:
            raise OutputError(f"{self.path}: the journal cannot be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ArgumentError(f"{self.path} is not a journal: {error}") from error

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        # Full: a returned result is on the disk, even after a power cut.
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA busy_timeout=10000")
        self._db.executescript(_SCHEMA)
        self._db.execute("INSERT OR IGNORE INTO facts VALUES ('version', ?)", (str(_VERSION),))
        (version,) = self._db.execute("SELECT value FROM facts WHERE name = 'version'").fetchone()
        if version != str(_VERSION):
            raise ArgumentError(f"{self.path} is a journal of version {version}; this is version {_VERSION}")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def find(self, run: str, request: Request) -> Entry | None:
        """Returns how a call of a run ended; None if the journal does not hold it.

        Raises:
            ArgumentError: its row is damaged.
        """
        row = next(iter(self._read(_FIND, run, request.key)), None)
        if row is None:
            return None
        number, place, state, start, end, completion = row
        with self._whole(run, number):
            if state not in get_args(State):
                raise ValueError(f"no state {state!r}")
            return Entry(place, state, start, end, Completion.from_json(json.loads(completion)))

    def past(self, run: str) -> Past:
        """Returns what a run has done so far.

        Raises:
            ArgumentError: a row is damaged.
        """
        rows, spent = self._read(_PAST, run), list[tuple[str, Usage]]()
        for number, _, state, _, usage in rows:
            with self._whole(run, number):
                spent.append((state, _usage(json.loads(usage))))
        rows = [row[1:] for row in rows]
        return Past(
            places=[place for place, state, *_ in rows if state == "complete"],
            next=max((place for place, *_ in rows), default=-1) + 1,
            seconds=max((end for _, _, end, _ in rows), default=0.0),
            usage=[usage for state, usage in spent if state == "complete" or usage.completion],
        )

    def _read(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._db.execute(query, values).fetchall()
        except sqlite3.ProgrammingError:  # it is closed
            raise
        except sqlite3.Error as error:
            raise ArgumentError(f"{self.path} cannot be read: {error}; take another journal") from error

    @contextmanager
    def _whole(self, run: str, number: int) -> Iterator[None]:
        """Refuses a row that cannot be read."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            where = f"{self.path} is damaged: row {number} of its table calls, of run {run}"
            raise ArgumentError(f"{where}, holds no call ({type(error).__name__}: {error}); {_DAMAGED}") from error

    async def write(self, run: str, request: Request, entry: Entry) -> None:
        """Writes the end of a call to the disk, over an earlier one that was cancelled, and returns once it is there.

        Calls that end in the same turn of the event loop share one transaction, since many writes take a disk as long
        as one.

        Raises:
            OutputError: it cannot be written, such as on a full disk.
        """
        if self.replay:
            return
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        waiting = self._waiting.setdefault(loop, [])
        waiting.append((_row(run, request, entry), written))
        if len(waiting) == 1:
            loop.call_soon(self._flush, loop)
        await written

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Writes all pending calls of a loop in one transaction."""
        waiting = self._waiting.pop(loop)
        error = None
        try:
            with self._lock:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    rows = [row for row, _ in waiting]
                    self._db.executemany("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # some failures end the transaction themselves
                        self._db.execute("ROLLBACK")
                    raise
        except sqlite3.Error as problem:
            error = OutputError(f"{self.path}: a completed call cannot be written: {problem}; make room, run again")
        except Exception as problem:  # noqa: BLE001 - whatever it is, nobody may be left waiting
            error = OutputError(f"{self.path}: a completed call cannot be written: {type(problem).__name__}: {problem}")
        for _, written in waiting:
            if written.cancelled():
                continue
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

    @property
    def completed(self) -> int:
        """Counts the calls of all runs that have ended by themselves."""
        with self._lock:
            return int(self._db.execute("SELECT COUNT(*) FROM calls WHERE state = 'complete'").fetchone()[0])


def _usage(record: dict[str, Any]) -> Usage:
    if not all(isinstance(number, int) for number in record.values()):
        raise ValueError(f"{record} are no counts")
    return Usage(**record)


def _row(run: str, request: Request, entry: Entry) -> tuple[Any, ...]:
    chat = [(message.role, message.text) for message in request.messages]
    question = json.dumps({"path": request.path, "sample": request.sample, "chat": chat}, ensure_ascii=False)
    answer = json.dumps(entry.completion.as_json(), ensure_ascii=False)
    return (run, request.key, entry.place, entry.state, entry.start, entry.end, question, answer)
