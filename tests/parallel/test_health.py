"""When everybody waits: a deadlock is told from a rank that is only late, and posted messages are watched."""

from __future__ import annotations

import pytest

from partsong.parallel.ranks import health
from partsong.parallel.ranks.health import BROKEN_OFF, DEPARTED, DIVERGED, SILENCE, Heartbeat

NOW = 1000.0


def waiting(rank: int, peers: tuple[int, ...], doing: str, others: dict[int, str], age: float = 2 * DIVERGED):
    """A heartbeat as it stands after the others' states have not changed for `age` seconds."""
    beat = Heartbeat(None, rank, 1 + len(others))
    beat.waiting, beat.peers, beat.doing = True, peers, doing
    beat._states = {other: (state, NOW - age) for other, state in others.items()}
    return beat


@pytest.mark.parametrize(
    ("others", "blamed"),
    [
        ({1: "4 1 0|broadcast"}, [1]),
        ({1: "4 1 0|ring (exchange 7)"}, []),
        ({1: "4 1 0|ring (exchange 8)"}, [1]),
        ({1: "4 0 |computing"}, []),
        ({1: "4 1 2|gather", 2: "9 0 |computing"}, []),
        ({1: "4 1 2|gather", 2: "9 1 0,1|broadcast"}, [1, 2]),
        ({1: "4 1 2|ring (exchange 7)", 2: "9 1 1|broadcast"}, [2]),
    ],
    ids=["other call", "same call", "other turn", "late", "late at two removes", "cycle", "two removes away"],
)
def test_only_a_closed_circle_of_waiting_ranks_is_a_deadlock(others: dict[int, str], blamed: list[int]) -> None:
    assert waiting(0, (1,), "ring (exchange 7)", others)._deadlocked_with(NOW) == blamed


def test_a_wait_that_has_just_begun_is_no_deadlock() -> None:
    assert waiting(0, (1,), "ring", {1: "4 1 0|broadcast"}, age=DIVERGED / 2)._deadlocked_with(NOW) == []


class Message:
    """Stands for NCCL's handle of a message: a wait for it returns at once, and it tells when it has arrived."""

    def __init__(self, *, arrived: bool) -> None:
        self.is_completed = lambda: arrived


class GivenUp(Exception):
    pass


def checked(monkeypatch: pytest.MonkeyPatch, arrived: bool, sign: str, age: float) -> str:
    """What a rank that computes says of rank 1, whose last sign of life is so old and from whom a message is due."""
    beat = Heartbeat(None, 0, 2)
    beat.awake, beat._seen = NOW, {1: (sign, NOW - age)}
    beat.posted.append(([Message(arrived=arrived)], "ring (exchange 7)", (1,), NOW - age))
    told: list[str] = []
    monkeypatch.setattr(beat, "report", lambda message, rank: told.append(message))

    def end(code: int) -> None:
        raise GivenUp

    monkeypatch.setattr(health.os, "_exit", end)
    try:
        beat._check()
    except GivenUp:
        return told[0]
    return ""


LEFT = "left the run"


@pytest.mark.parametrize(
    ("arrived", "sign", "age", "words"),
    [
        (False, "4|computing", SILENCE + 1, "waits in ring (exchange 7) for rank 1, silent"),
        (False, LEFT, DEPARTED + 1, "waits in ring (exchange 7) for rank 1, which left the run"),
        (False, LEFT, DEPARTED - 1, ""),
        (False, "4|computing", 1.0, ""),
        (True, "4|computing", SILENCE + 1, ""),
        (True, LEFT, DEPARTED + 1, ""),
    ],
)
def test_a_message_that_cannot_arrive_ends_a_rank_that_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, arrived: bool, sign: str, age: float, words: str
) -> None:
    said = checked(monkeypatch, arrived, sign, age)
    assert words in said and bool(words) == bool(said)


@pytest.mark.parametrize(("broken_off", "blamed"), [("", []), (" a call of the model", [1])])
def test_a_rank_that_broke_off_its_work_is_waited_for_more_briefly(broken_off: str, blamed: list[int]) -> None:
    state = f"4 1 0{broken_off}|broadcast"
    assert BROKEN_OFF < DIVERGED
    assert waiting(0, (1,), "ring", {1: state}, age=(BROKEN_OFF + DIVERGED) / 2)._deadlocked_with(NOW) == blamed
