"""Journals with damaged rows, and calls that cannot be written: one line says where, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import ArgumentError, OutputError
from partsong.reasoning import Completion, Journal, Line, Message, Request, Run, ScriptedEngine

ASK = [Message("user", ("what is it",))]


async def calls(journal: Journal, num: int = 3) -> list[str]:
    run = Run(ScriptedEngine(lambda request, draw: Line(text="four")), journal=journal)
    done = await asyncio.gather(*(run.call(ASK, path=("call", str(number))) for number in range(num)))
    return [each.text for each in done]


#: What stands in the completion of the second row, and what of the error says so.
DAMAGE = {
    "cut": ('{"text": "fo', "row 2"),
    "empty": ("", "row 2"),
    "no object": ("[1]", "row 2"),
    "no usage": ('{"text": "four"}', "row 2"),
    "strange usage": ('{"text": "four", "usage": {"prompt": "x"}}', "row 2"),
    "unknown usage": ('{"text": "four", "usage": {"tokens": 2}}', "row 2"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_row_is_named(name: str, tmp_path: Path) -> None:
    path, (text, words) = tmp_path / "run.db", DAMAGE[name]
    with Journal(path) as journal:
        asyncio.run(calls(journal))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE calls SET completion = ? WHERE rowid = 2", (text,))
    with Journal(path) as journal:
        with pytest.raises(ArgumentError, match=words) as caught:
            asyncio.run(calls(journal))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM calls WHERE rowid = 2")
    with Journal(path) as journal:
        assert asyncio.run(calls(journal)) == ["four"] * 3


def test_a_completion_that_is_damaged_otherwise_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        asyncio.run(calls(journal))
    with closing(sqlite3.connect(path)) as db, db:
        whole = json.loads(db.execute("SELECT completion FROM calls WHERE rowid = 1").fetchone()[0])
        db.execute("UPDATE calls SET completion = ? WHERE rowid = 1", (json.dumps({**whole, "colour": 1}),))
    with Journal(path) as journal, pytest.raises(ArgumentError, match="row 1 of its table calls"):
        asyncio.run(calls(journal))


class _Unwritable(Completion):
    """A completion of a foreign engine, whose record no database takes."""

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "text": "\ud83d"}


def test_what_cannot_be_written_fails_its_calls_and_releases_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    request = Request(messages=tuple(ASK), path=("call", "0"))

    async def write(journal: Journal) -> None:
        from partsong.reasoning.calls.journal import Entry

        entries = [Entry(0, "complete", 0.0, 1.0, kind(text="4")) for kind in (Completion, _Unwritable)]
        ends = await asyncio.wait_for(
            asyncio.gather(*(journal.write("run", request, entry) for entry in entries), return_exceptions=True), 20
        )
        assert all(isinstance(end, OutputError) for end in ends)
        assert "UnicodeEncodeError" in str(ends[0])

    with Journal(path) as journal:
        asyncio.run(write(journal))
        with closing(sqlite3.connect(path, timeout=1)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.rollback()
        assert asyncio.run(calls(journal)) == ["four"] * 3
