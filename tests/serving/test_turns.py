"""Checks who makes a step next, against small cases worked out by hand and a simulated hour of traffic."""

from __future__ import annotations

import random

from partsong.serving.turns import Shares, Standing, choose, entry_time


def test_calls_that_look_alike_go_together_and_others_wait() -> None:
    standings = [Standing("a", 0, shape=1), Standing("b", 1, shape=2), Standing("c", 2, shape=1)]
    assert choose(standings, max_rows=8, now=0.0) == ["a", "c"]


def test_no_more_rows_than_allowed_but_a_large_job_goes_alone() -> None:
    standings = [Standing(name, place, shape=1, rows=2) for place, name in enumerate("abcd")]
    assert choose(standings, max_rows=4, now=0.0) == ["a", "b"]
    assert choose([Standing("z", 0, shape=1, rows=32), *standings], max_rows=4, now=0.0) == ["z"]


def test_the_job_on_which_least_was_spent_leads() -> None:
    standings = [Standing("old", 0, used=3.0, shape=1), Standing("new", 1, used=1.0, shape=2)]
    assert choose(standings, max_rows=8, now=0.0) == ["new"]


def test_a_deadline_that_would_be_missed_leads() -> None:
    late = Standing("late", 9, deadline=10.0, remaining=6.0, used=100.0, shape=2)
    others = [Standing("a", 0, shape=1)]
    assert choose([*others, late], max_rows=8, now=1.0) == ["late"]
    # With plenty of time it waits its turn.
    late.deadline = 1000.0
    assert choose([*others, late], max_rows=8, now=1.0) == ["a"]


def test_a_newcomer_does_not_overtake_for_ever() -> None:
    standings = [Standing("a", 0, used=50.0, shape=1)]
    assert entry_time(standings) == 50.0
    assert entry_time([]) == 0.0


def test_the_cost_of_a_shared_step_is_shared() -> None:
    pair = [Standing("a", 0, used=3.0), Standing("b", 1)]
    shares = Shares()
    shares.charge(pair, 2.0)
    assert [each.used for each in pair] == [4.0, 1.0]
    assert shares.used == {"": 2.0}


def test_a_user_with_many_jobs_gets_no_more_than_one_with_few() -> None:
    """Simulates a minute of one user with twelve jobs of any length, and of another with one at a time."""
    shares, active = Shares(), [Standing(f"many{place}", place, shape=place, user="many") for place in range(12)]
    spent = {"many": 0.0, "few": 0.0}
    for user in spent:
        shares.arrive(user, spent)
    active.append(Standing("few", 12, shape=99, user="few"))
    for turn in range(600):
        (name,) = choose(active, max_rows=1, now=0.0, used=shares.used)
        standing = next(each for each in active if each.id == name)
        shares.charge([standing], 0.1)
        spent[standing.user] += 0.1
        if turn % 20 == 0:  # a job of theirs is done, and the next one comes
            active = [each for each in active if each.user != "few"]
            active.append(Standing("few", 100 + turn, used=entry_time(active), shape=99, user="few"))
    assert abs(spent["many"] - spent["few"]) <= 0.2


def test_who_comes_back_has_saved_nothing_up() -> None:
    shares = Shares()
    shares.add("worker", 100.0)
    shares.arrive("guest", {"worker"})
    assert shares.used["guest"] == 100.0
    shares.arrive("worker", set())
    assert shares.used["worker"] == 100.0


def test_no_size_waits_more_than_twice_its_fair_share() -> None:
    """Simulates jobs of three sizes that arrive at random, and measures the time between two steps of each."""
    drawn = random.Random(0)
    seconds = {1: 1.0, 2: 4.0, 3: 16.0}  # one step of one job of each size
    active: dict[str, Standing] = {}
    left: dict[str, int] = {}
    elapsed, numbers = 0.0, iter(range(10_000))
    served: dict[str, float] = {}
    for _ in range(3000):
        if len(active) < 12 and drawn.random() < 0.4:
            place = next(numbers)
            name, shape = f"job{place}", drawn.choice([1, 1, 1, 1, 2, 3])
            used = entry_time(list(active.values()))
            active[name], left[name] = Standing(name, place, used=used, shape=shape), 28
            served[name] = elapsed
        chosen = choose(list(active.values()), max_rows=8, now=elapsed)
        if not chosen:
            continue
        step = seconds[active[chosen[0]].shape] * (1 + 0.3 * (len(chosen) - 1))  # type: ignore[index]
        elapsed += step
        Shares().charge([active[name] for name in chosen], step)
        for name in chosen:
            # Between two steps of a job every other size may have had one step, and the slowest of these twice.
            assert elapsed - served[name] <= 2 * len(active) * max(seconds.values()) * 3.1
            served[name], left[name] = elapsed, left[name] - 1
            if not left[name]:
                del active[name]
    for name, standing in active.items():
        others = [each.used for each in active.values()]
        # Nobody is ahead of anybody by more than the costliest step.
        assert standing.used - min(others) <= 16.0 * 3.1 + 1e-9, name
