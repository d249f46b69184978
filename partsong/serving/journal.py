"""Keeps jobs across restarts of a server, in a SQLite file."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from partsong.errors import OutputError
from partsong.serving.jobs import Job

__all__ = ["JobJournal"]


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
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, created REAL NOT NULL, record TEXT NOT NULL)"
            )
            self._database.execute("CREATE INDEX IF NOT EXISTS by_age ON jobs (created)")
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            raise OutputError(f"the journal {path} cannot be used: {error}; is another server using it?") from error

    def write(self, job: Job) -> None:
        """Writes a job."""
        row = (job.id, job.created_at, json.dumps(job.as_record()))
        self._database.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)", row)

    def read(self) -> list[Job]:
        """Returns all jobs, the oldest first."""
        rows = self._database.execute("SELECT record FROM jobs ORDER BY created, id")
        return [Job.from_record(json.loads(record)) for (record,) in rows]

    def remove(self, name: str) -> None:
        """Forgets a job."""
        self._database.execute("DELETE FROM jobs WHERE id = ?", (name,))

    def close(self) -> None:
        """Closes the file."""
        self._database.close()
