"""`launch` brings back what rank 0 returned, and ends every rank when one fails, naming the one to blame."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import ArgumentError, PartsongError, RankError, UnsupportedError
from partsong.parallel.ranks.launch import _Run, launch
from tests.parallel import fault_worker

NEVER_LONGER = 60.0  # start-up of ranks on a busy machine included; the collectives' own limit is 120 s


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Watched:
    """One failing run: its error, how long it took from the failure on, and what it left behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, nproc: int, fn: Any, *args: Any) -> None:
        start, ports = _Run.start, []

        def remember(run: _Run) -> None:
            start(run)
            ports.append(run.store.port)

        monkeypatch.setattr(_Run, "start", remember)
        with pytest.raises(PartsongError) as caught:
            launch(fn, nproc, *args)
        self.error, self.text = caught.value, str(caught.value)
        self.everything = "\n".join([self.text, *getattr(caught.value, "__notes__", [])])
        marks = sorted(folder.iterdir())
        self.seconds = time.time() - max((mark.stat().st_mtime for mark in marks), default=0.0)
        self.pids = [int(mark.read_text()) for mark in marks if mark.name.isdigit() and mark.read_text().isdigit()]
        self.port = ports[0]

    def left_nothing(self, nproc: int) -> bool:
        with socket.socket() as probe:
            closed = probe.connect_ex(("127.0.0.1", self.port)) != 0
        return closed and len(self.pids) == nproc and not any(alive(pid) for pid in self.pids)


def test_value_of_rank_zero_and_the_environment_is_left_alone() -> None:
    before = dict(os.environ)
    value = launch(fault_worker.value_of, 2, {"a": [1, 2]})
    assert (value["a"], value["rank"], value["world"]) == ([1, 2], 0, 2)
    assert value["pid"] != os.getpid()
    assert not alive(value["pid"])
    assert dict(os.environ) == before


def test_a_partsong_error_keeps_its_type_and_gets_the_rank_as_a_note() -> None:
    with pytest.raises(ArgumentError, match="height=7 does not fit") as caught:
        launch(fault_worker.raise_on, 2, 1, "argument")
    note = "\n".join(caught.value.__notes__)
    assert "rank 1" in note
    assert "raise_on" in note


def test_the_reason_is_told_rather_than_that_peers_were_gone() -> None:
    with pytest.raises(UnsupportedError, match="no such thing"):
        launch(fault_worker.refuse_while_others_connect, 2)


def test_an_error_that_cannot_travel_is_told_all_the_same() -> None:
    with pytest.raises(RankError, match="rank 0.*Opaque.*cannot travel") as caught:
        launch(fault_worker.raise_on, 1, 0, "opaque")
    assert caught.value.rank == 0


def test_a_result_that_cannot_travel_is_an_error_and_no_hang() -> None:
    with pytest.raises(RankError, match="rank 0"):
        launch(fault_worker.unpicklable_result, 1)


@pytest.mark.parametrize("nproc", [0, -1, True, 2.0, "2", None])
def test_refuses_a_number_of_ranks_that_is_no_positive_integer(nproc: Any) -> None:
    with pytest.raises(ArgumentError, match="number of ranks: nproc=.*; use a positive integer"):
        launch(max, nproc)


def test_refuses_what_cannot_be_sent() -> None:
    with pytest.raises(ArgumentError, match="top level of a module"):
        launch(lambda: 1, 1)
    with pytest.raises(ArgumentError, match="plain values"):
        launch(fault_worker.value_of, 1, {"handle": socket.socket()})


FAULTS = [
    pytest.param("SIGKILL", 2, 0, "SIGKILL", marks=pytest.mark.full),
    ("SIGKILL", 3, 2, "SIGKILL"),
    ("SIGSTOP", 2, 1, "silent|dead"),
    ("exit", 2, 1, "exited with code 7"),
    ("return", 3, 1, "left the run"),
    ("raise", 3, 1, "bad luck at step 3"),
]


@pytest.mark.parametrize(("how", "nproc", "victim", "text"), FAULTS)
@pytest.mark.slow
def test_a_rank_that_fails_in_mid_run_ends_the_run(
    how: str, nproc: int, victim: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(monkeypatch, tmp_path, nproc, fault_worker.fail_in_loop, victim, how, str(tmp_path))
    assert any(word in run.text for word in text.split("|")), run.everything
    assert f"rank {victim}" in run.text, run.everything
    if isinstance(run.error, RankError):
        assert run.error.rank == victim
    assert run.seconds < 10.0
    assert run.left_nothing(nproc)


def test_a_rank_that_alone_broke_off_a_call_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Watched(monkeypatch, tmp_path, 2, fault_worker.break_off, 1, str(tmp_path))
    assert "has broken off the pipeline's last call after step 1" in run.text, run.everything
    assert isinstance(run.error, RankError)
    assert run.error.rank == 1
    assert run.seconds < 10.0


@pytest.mark.full
def test_ranks_of_a_program_of_ones_own_that_stand_elsewhere_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Watched(monkeypatch, tmp_path, 2, fault_worker.break_off_own_loop, 1, str(tmp_path))
    assert "the ranks made different calls" in run.everything or "different" in run.text, run.everything
    assert run.seconds < 10.0


def test_a_rank_that_said_goodbye_is_not_waited_for() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1.*left the run") as caught:
        launch(fault_worker.return_while_awaited, 2, 1)
    assert "a message that never comes" in str(caught.value)
    assert time.monotonic() - start < NEVER_LONGER


@pytest.mark.parametrize(
    "leaves",
    [pytest.param(False, id="at once"), pytest.param(True, marks=pytest.mark.full, id="after the other has left")],
)
@pytest.mark.slow
def test_ranks_that_ask_for_different_things_name_both(leaves: bool, tmp_path: Path) -> None:
    launch(fault_worker.disagree_everywhere, 2, str(tmp_path), leaves)
    first, second = (tmp_path / "0").read_text(), (tmp_path / "1").read_text()
    for text in (first, second):
        assert text.startswith("DistributedError")
        assert "ring of rank 0" in text
        assert "broadcast of rank 1" in text


#: Ranks that only wait do without the libraries of models, which load slowly.
WAITING = """
from partsong.fork_server import begin_early
from partsong.left_out_libraries import leave_out
if __name__ == "__main__":
    leave_out("diffusers", "peft", "transformers")
    begin_early(2)
    from partsong.parallel import launch
    from tests.parallel.waiting import wait_for_ever
    launch(wait_for_ever, 2)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are Unix's")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL])
def test_ranks_end_with_the_process_that_launched_them(number: int, tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    paths = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert parent.stdout is not None
    ranks = [int(parent.stdout.readline()) for _ in range(2)]
    os.kill(parent.pid, number)
    # The ranks hold the other end: it closes with the last of them. The file's time limit is the test's.
    assert parent.stdout.read() == ""
    parent.wait()
    assert not any(Path(f"/proc/{rank}").exists() and _runs(rank) for rank in ranks)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
