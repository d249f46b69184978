"""Keeps jobs across restarts of a server, in a SQLite file."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from partsong.errors import OutputError
from partsong.serving.jobs import Job
from partsong.whole_text import whole_json

__all__ = ["JobJournal"]

_log = logging.getLogger(__name__)


class JobJournal:
    """Holds one row per job, which is replaced at each change of its state.

    A row marks a job as completed only after its files are written, so the row is true whenever the server
    ends. Two servers cannot share a journal.

    Args:
        path: of the file; it is made if it is not there.

    Raises:
        OutputError: the file is no journal, cannot be written, or is another server's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # One thread opens it and another uses it, never two at a time.
            self._database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
            # Others must not write while this server lives. The write-ahead log keeps every change that was made, also
            # when the process is killed.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            # A change is the system's at once, and the disk's a little later: the event loop does not wait for the disk
            # at each change. What a machine without power forgets are its last changes, never part of one.
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, created REAL NOT NULL, record TEXT NOT NULL)"
            )
            self._database.execute("CREATE INDEX IF NOT EXISTS by_age ON jobs (created)")
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise OutputError(f"the journal {path} cannot be used: {error}; is another server using it?") from error

    def write(self, job: Job) -> None:
        """Writes a job.

        Raises:
            OutputError: the disk is full, or the file cannot be written for another reason.
        """
        row = (job.id, job.created_at, json.dumps(job.as_record()))
        self._change("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", [row])

    def read(self) -> list[Job]:
        """Returns all jobs, the oldest first; a row that cannot be read is left alone and hides no other."""
        jobs = []
        for name, record in self._database.execute("SELECT id, record FROM jobs ORDER BY created, id"):
            try:
                jobs.append(Job.from_record(whole_json(json.loads(record))))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                _log.warning("the journal's row of job %s cannot be read: %s", name, error)
        return jobs

    def remove(self, names: Iterable[str]) -> None:
        """Forgets jobs.

        Raises:
            OutputError: the file cannot be written.
        """
        self._change("DELETE FROM jobs WHERE id = ?", [(name,) for name in names])

    def _change(self, statement: str, rows: list[tuple[object, ...]]) -> None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany(statement, rows)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise OutputError(f"the journal {self.path} cannot be written: {error}; is the disk full?") from error

    def close(self) -> None:
        """Closes the file."""
        self._database.close()
