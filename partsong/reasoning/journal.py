"""Completed calls on disk: a run that was killed goes on, and one that has ended can be replayed without an engine.

SQLite in WAL mode: a completed call is durable before anybody sees its result, and several processes may share a file.
The order in which the calls of a run ended is kept with them. A strategy that stops early decides by that order, so a
replay hands the calls out in it and decides the same. What a cancelled call had cost is kept for the replay's report; a
run that goes on makes it anew.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from partsong.errors import ArgumentError, OutputError
from partsong.reasoning.call import Completion, Request

__all__ = ["Journal"]

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS calls (
    run TEXT NOT NULL, key TEXT NOT NULL, place INTEGER NOT NULL, cancelled INTEGER NOT NULL,
    request TEXT NOT NULL, completion TEXT NOT NULL, PRIMARY KEY (run, key)
) STRICT;
"""


class Journal:
    """Completions by run and by the key of their request.

    Args:
        path: file; it and its folder are made where they are not there.
        replay: nothing is written, and nothing may be asked of an engine.

    Raises:
        OutputError: the file cannot be opened or written.
        ArgumentError: it is no journal, or of another version.
    """

    def __init__(self, path: str | Path, *, replay: bool = False) -> None:
        self.path, self.replay = Path(path), replay
        self._lock = threading.Lock()
        if replay and not self.path.is_file():
            raise ArgumentError(f"{self.path} is not there, so there is nothing to replay")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            self._open()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise OutputError(f"{self.path}: the journal cannot be opened: {error}") from error
            raise ArgumentError(f"{self.path} is not a journal: {error}") from error
        except OSError as error:
            raise OutputError(f"{self.path}: the journal cannot be opened: {error}") from error

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        # Full: a result that was shown is on the disk, also after a power cut.
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA busy_timeout=10000")
        self._db.executescript(_SCHEMA)
        self._db.execute("INSERT OR IGNORE INTO facts VALUES ('version', ?)", (str(_VERSION),))
        (version,) = self._db.execute("SELECT value FROM facts WHERE name = 'version'").fetchone()
        if version != str(_VERSION):
            raise ArgumentError(f"{self.path} is a journal of version {version}; this is version {_VERSION}")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def find(self, run: str, request: Request) -> tuple[int, Completion] | None:
        """The completion of a call of a run and its place in the order of endings, if it has been made."""
        row = self._one(
            "SELECT place, completion FROM calls WHERE run = ? AND key = ? AND NOT cancelled", run, request.key
        )
        return None if row is None else (row[0], Completion.from_json(json.loads(row[1])))

    def find_cancelled(self, run: str, request: Request) -> Completion | None:
        """How far a call had come when it was cancelled."""
        row = self._one("SELECT completion FROM calls WHERE run = ? AND key = ? AND cancelled", run, request.key)
        return None if row is None else Completion.from_json(json.loads(row[0]))

    def places(self, run: str) -> list[int]:
        """The places of a run's completed calls, in order."""
        with self._lock:
            found = self._db.execute("SELECT place FROM calls WHERE run = ? AND NOT cancelled ORDER BY place", (run,))
            return [place for (place,) in found.fetchall()]

    def write(self, run: str, request: Request, place: int, completion: Completion) -> None:
        """Makes a completion durable, in the place of a cancelled one of the same call.

        Raises:
            OutputError: it cannot be written, such as on a full disk.
        """
        if self.replay:
            return
        said = json.dumps({"path": request.path, "sample": request.sample, "chat": _chat(request)}, ensure_ascii=False)
        line = json.dumps(completion.as_json(), ensure_ascii=False)
        row = (run, request.key, place, int(completion.finish == "cancelled"), said, line)
        try:
            with self._lock:
                self._db.execute("INSERT OR REPLACE INTO calls VALUES (?, ?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise OutputError(
                f"{self.path}: a completed call cannot be written: {error}; make room, run again"
            ) from error

    def _one(self, query: str, *values: object) -> Any:
        with self._lock:
            return self._db.execute(query, values).fetchone()

    def __len__(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT COUNT(*) FROM calls").fetchone()[0])


def _chat(request: Request) -> list[Any]:
    return [(message.role, message.text) for message in request.messages]
