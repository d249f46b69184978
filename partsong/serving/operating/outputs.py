"""Keeps what a server has made in a folder for each day, for as long as the operator says."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path

from partsong.serving.jobs import Job

__all__ = ["DailyOutputs"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DailyOutputs:
    """Keeps files under names that say when and by which model they were made, beside what was asked for as JSON.

    Such as ``2026-11-28/142233-shapes-5f1c07-0.png`` and ``2026-11-28/142233-shapes-5f1c07.json``.

    Attributes:
        folder: of the days.
        days: how many days are kept, today included; None keeps all.
    """

    folder: Path
    days: int | None = None

    def keep(self, job: Job, files: Sequence[Path]) -> None:
        """Keeps the files of a job that is done; one that cannot be written is logged."""
        at = datetime.fromtimestamp(job.completed_at or time.time())
        day = self.folder / at.date().isoformat()
        name = f"{at:%H%M%S}-{job.model}-{job.id[-6:]}"
        try:
            day.mkdir(parents=True, exist_ok=True)
            (day / f"{name}.json").write_text(json.dumps(job.as_json(), indent=1), encoding="utf-8")
            for number, path in enumerate(files):
                _link(path, day / (f"{name}-{number}{path.suffix}" if len(files) > 1 else f"{name}{path.suffix}"))
        except OSError as error:
            _log.error("what job %s made cannot be kept in %s: %s", job.id, day, error)

    def remove_old(self, today: date) -> None:
        """Removes days that are over; folders of other names stay."""
        if self.days is None or not self.folder.is_dir():
            return
        first = today - timedelta(days=self.days - 1)
        for path in self.folder.iterdir():
            with suppress(ValueError):  # not a day
                if date.fromisoformat(path.name) < first and path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)


def _link(path: Path, to: Path) -> None:
    """Gives a file a second name, or copies it to another disk."""
    try:
        os.link(path, to)
    except OSError:
        shutil.copyfile(path, to)
