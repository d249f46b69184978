"""Checks which replica takes a job, without ranks: cases worked out by hand, and a long run of chance."""

from __future__ import annotations

import random

from partsong.serving.roster import Roster


def _roster(*up: int) -> Roster:
    roster = Roster(3)
    roster.up |= set(up)
    return roster


def test_a_job_goes_where_least_is_to_do() -> None:
    roster = _roster(0, 2)
    assert [roster.place(name) for name in "abcd"] == [0, 2, 0, 2]
    roster.end("c")
    assert roster.place("e") == 0
    assert [roster.load(number) for number in range(3)] == [2, 0, 2]


def test_a_replica_that_cannot_be_reached_is_passed_over() -> None:
    roster = _roster(0, 1)
    asked: list[int] = []

    def take(number: int) -> bool:
        asked.append(number)
        return number == 1

    assert roster.place("a", take) == 1
    assert asked == [0, 1]
    assert roster.place("b", lambda number: False) is None
    assert roster.where("b") is None


def test_without_replicas_a_job_is_nowhere() -> None:
    assert _roster().place("a") is None


def test_a_lost_replica_gives_up_all_it_has() -> None:
    roster = _roster(0, 1)
    for name in "abcdef":
        roster.place(name)
    roster.begin("c")
    assert roster.lose(0) == (["a", "e"], ["c"])
    assert roster.lose(0) == ([], [])
    assert roster.up == {1}
    assert roster.place("a") == 1
    assert [name for name in "abcdef" if roster.where(name) is None] == ["c", "e"]


def test_what_waits_moves_to_a_replica_that_has_come() -> None:
    roster = _roster(0)
    for name in "abcde":
        roster.place(name)
    roster.begin("a")
    assert roster.to_move() == []
    roster.up.add(1)
    assert roster.to_move() == [("e", 0), ("d", 0)]  # the youngest; three to two
    assert roster.to_move() == []  # they are on their way
    roster.end("e")
    assert roster.place("e") == 1
    roster.begin("d")  # began before it was asked back
    assert (roster.load(0), roster.load(1)) == (4, 1)
    assert roster.to_move() == [("c", 0)]


def test_jobs_at_work_stay_where_they_are() -> None:
    roster = _roster(0)
    for name in "abcd":
        roster.place(name)
        roster.begin(name)
    roster.up.add(1)
    assert roster.to_move() == []


def test_no_job_is_lost_and_none_is_at_two_places_whatever_happens() -> None:
    """Lets replicas come and go and jobs arrive, begin, move and end by chance, beside a plain account of all that."""
    drawn = random.Random(0)
    roster, number = Roster(3), 0
    at: dict[str, int | None] = {}
    begun: set[str] = set()
    for _ in range(2000):
        kind = drawn.choice(["come", "go", "arrive", "arrive", "begin", "end", "end", "move"])
        replica = drawn.randrange(3)
        if kind == "come":
            roster.up.add(replica)
            for name in [name for name, place in at.items() if place is None]:
                at[name] = roster.place(name)
        elif kind == "go" and replica in roster.up:
            waiting, working = roster.lose(replica)
            assert sorted(waiting + working) == sorted(name for name, place in at.items() if place == replica)
            assert set(working) == {name for name in begun if at[name] == replica}
            begun -= set(working)
            for name in waiting + working:
                at[name] = roster.place(name)
        elif kind == "arrive":
            number += 1
            at[f"job{number}"] = roster.place(f"job{number}")
        elif kind == "move":
            for name, place in roster.to_move():
                assert at[name] == place
                assert name not in begun
                roster.end(name)
                at[name] = roster.place(name)
        placed = [name for name, place in at.items() if place is not None]
        if kind in ("begin", "end") and placed:
            name = drawn.choice(placed)
            if kind == "begin":
                roster.begin(name)
                begun.add(name)
            else:
                roster.end(name)
                begun.discard(name)
                del at[name]
        assert {name: roster.where(name) for name in at} == at
        assert [roster.load(each) for each in range(3)] == [list(at.values()).count(each) for each in range(3)]
        if roster.up:
            assert None not in at.values()


def test_one_of_two_jobs_moves_and_a_single_one_stays() -> None:
    for names, moves in (("ab", [("b", 0)]), ("a", [])):
        roster = Roster(2)
        roster.up.add(0)
        for name in names:
            roster.place(name)
        roster.up.add(1)
        assert roster.to_move() == moves
