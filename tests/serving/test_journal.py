"""Checks that a journal gives back what was written, also after its server was killed."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from partsong.errors import OutputError
from partsong.serving.jobs import Job
from partsong.serving.journal import JobJournal
from partsong.serving.messages import Spent

_JOB = Job(
    id="image_1",
    kind="image",
    model="shapes",
    request={"prompt": "a red circle", "n": 2, "seed": 7, "width": 64, "height": 32},
    strategy="ulysses",
    status="completed",
    created_at=12.5,
    spent=(Spent(10, 0.5), Spent(20, 0.25)),
    files=("image_1-0.png", "image_1-1.png"),
    error={"code": "x", "message": "y"},
)


def test_a_job_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = JobJournal(tmp_path / "jobs.sqlite")
    journal.write(_JOB)
    second = replace(_JOB, id="image_0", created_at=1.0)
    journal.write(second)
    assert journal.read() == [second, _JOB]
    journal.remove(["image_0"])
    assert journal.read() == [_JOB]
    journal.close()


def test_what_was_written_outlives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    process = multiprocessing.get_context("fork").Process(target=_write_and_die, args=(path,))
    process.start()
    process.join(20)
    assert process.exitcode == -9
    journal = JobJournal(path)
    assert [job.id for job in journal.read()] == [f"image_{number}" for number in range(50)]
    journal.close()


def test_two_servers_cannot_share_a_journal(tmp_path: Path) -> None:
    first = JobJournal(tmp_path / "jobs.sqlite")
    with pytest.raises(OutputError, match="is another server using it"):
        JobJournal(tmp_path / "jobs.sqlite")
    first.close()
    JobJournal(tmp_path / "jobs.sqlite").close()


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(OutputError, match="cannot be used"):
        JobJournal(tmp_path / "jobs.sqlite")


def test_json_has_the_keys_of_the_api() -> None:
    shown = _JOB.as_json()
    assert shown["size"] == "64x32"
    assert shown["n"] == 2
    assert shown["progress"] == 100
    assert shown["ranks"][1] == {"rank": 1, "bytes_sent": 20, "seconds_waiting": 0.25}
    assert shown["outputs"][0] == {"url": "/v1/files/image_1-0.png", "kind": "image"}
    half = replace(_JOB, status="in_progress", step=14, steps=28)
    assert half.as_json()["progress"] == 50


def _write_and_die(path: Path) -> None:
    journal = JobJournal(path)
    for number in range(50):
        journal.write(replace(_JOB, id=f"image_{number}", created_at=float(number)))
    os.kill(os.getpid(), 9)
