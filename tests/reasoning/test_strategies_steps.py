"""Strategies over steps, against enumeration of all texts a small model can write."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning import Budget, Line, Parameters, Request, Run, ScriptedEngine
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import beam_search, dvts, particle_filtering, particle_gibbs
from partsong.reasoning.strategies.particles import systematic


def last_word(text: str) -> str | None:
    return text.split()[-1] if text.split() else None


def letters(request: Request, draw: random.Random) -> Line:
    """One letter per step, a with a chance of 0.7; two steps and an end."""
    before = request.messages[-1].text.split() if request.messages[-1].role == "assistant" else []
    return Line(text="" if len(before) == 2 else "a" if draw.random() < 0.7 else "b", tokens=3)


#: What a scorer thinks of each text; odds of 1/4, 4, 1/9, 1, 9 and 1.
SCORES = {"a": 0.2, "b": 0.8, "a a": 0.1, "a b": 0.5, "b a": 0.9, "b b": 0.5}


def known(question: str, trace: Any) -> float:
    return SCORES[" ".join(trace.text.split())]


def whole(text: str) -> bool:
    return len(text.split()) == 2


def run_of(strategy: Any, script: Any = letters, seed: int = 0, budget: Budget | None = None, **knobs: Any) -> Any:
    engine = ScriptedEngine(script, seconds_per_token=1.0, chunk=1)
    run = Run(engine, seed=seed, budget=budget, concurrency=1000)
    options = {"extract": last_word, "scorer": known, "finished": whole, **knobs}
    answer, seconds = run_virtual(strategy(run, "q", **options))
    return answer, run, engine, seconds


def test_systematic_draws_have_the_right_mean_and_are_never_off_by_one() -> None:
    """The mean over a fine grid of starts, exactly; by hand, num * weight of each place."""
    draw = random.Random(0)
    for _ in range(50):
        weights, num = [draw.random() ** 3 for _ in range(draw.randint(1, 6))], draw.randint(1, 9)
        share = [num * w / sum(weights) for w in weights]
        counts: Counter[int] = Counter()
        grid = 400
        for i in range(grid):
            drawn = Counter(systematic(weights, num, (i + 0.5) / grid))
            counts += drawn
            assert drawn.total() == num
            assert all(abs(drawn[place] - expected) < 1 for place, expected in enumerate(share))
        assert all(abs(counts[place] / grid - expected) <= 1 / grid for place, expected in enumerate(share))


def test_particles_have_the_distribution_the_scores_ask_for() -> None:
    """Against enumeration: the chance of a first letter times its odds, then of the second, over many runs."""
    odds = {text: score / (1 - score) for text, score in SCORES.items()}
    chance = {"a": 0.7, "b": 0.3}
    expected = {x + y: chance[x] * odds[x] * chance[y] for x, y in itertools.product("ab", "ab")}
    drawn: Counter[str] = Counter()
    for seed in range(24):
        _, run, _, _ = run_of(particle_filtering, seed=seed, particles=100)
        for i in range(100):
            node = run.graph.nodes[f"step 1#{i}"]
            assert node.completion is not None
            drawn[node.request.messages[1].text.strip() + node.completion.text] += 1
    for text, weight in expected.items():
        assert drawn[text] / drawn.total() == pytest.approx(weight / sum(expected.values()), abs=0.02)


def test_the_best_particle_answers_and_costs_what_it_must() -> None:
    answer, _, engine, seconds = run_of(particle_filtering, particles=20)
    assert answer.text == "b\n\na" and answer.answer == "a"
    assert [name.split("#")[0] for name in answer.calls] == ["step 0", "step 1"]
    cost = answer.summary
    assert cost["calls"] == 40 and cost["tokens_total"] == 120
    assert cost["tokens_accepted"] == cost["tokens_critical"] == 6 == seconds
    second = next(request for request in engine.asked if request.path == ("step 1",))
    assert [message.role for message in second.messages] == ["user", "assistant"]
    assert second.messages[1].text in ("a\n\n", "b\n\n") and second.parameters.stop == ("\n\n",)


def test_an_empty_step_ends_a_text() -> None:
    answer, _, _, _ = run_of(particle_filtering, particles=3, finished=lambda text: False)
    assert len(answer.text.split()) == 2 and len(answer.calls) == 3
    assert answer.details["steps"] == 3


def test_gibbs_holds_one_text_and_asks_for_it_once() -> None:
    answer, run, _, _ = run_of(particle_gibbs, particles=4, iterations=3)
    # Two steps of four, then twice two steps of three: the held text is not written again.
    assert answer.summary["calls"] == 8 + 6 + 6
    assert not any(name.startswith(("pass 1", "pass 2")) and name.endswith("#0") for name in run.graph.nodes)
    assert answer.details["passes"] == 3


def test_gibbs_passes_do_not_lose_the_best() -> None:
    """The held text stays in the swarm; over many runs the answer is better than one pass of as many particles."""
    right = [sum(run_of(particle_gibbs, seed=s, particles=3, iterations=n)[0].text == "b\n\na" for s in range(60))
             for n in (1, 4)]  # fmt: skip
    assert right[1] > right[0]


def by_place(request: Request, draw: random.Random) -> Line:
    """Which of two continuations: by the sample's number, so that a width of two writes all texts."""
    before = request.messages[-1].text.split() if request.messages[-1].role == "assistant" else []
    word = "lr"[request.sample % 2]
    return Line(text=word if len(before) < 3 else "", tokens=2)


@pytest.mark.parametrize("aggregate", ["last", "min", "prod"])
def test_a_beam_as_wide_as_the_tree_finds_the_best_text(aggregate: Any) -> None:
    """Brute force over all eight texts of three steps."""
    draw = random.Random(5)
    for seed in range(5):
        table = {t: draw.uniform(0.05, 0.95) for n in (1, 2, 3) for t in itertools.product("lr", repeat=n)}
        fold = {"last": lambda s: s[-1], "min": min, "prod": lambda s: s[0] * s[1] * s[2]}[aggregate]
        texts = list(itertools.product("lr", repeat=3))
        best = max(texts, key=lambda t: fold([table[t[:1]], table[t[:2]], table[t]]))
        answer, _, _, _ = run_of(
            beam_search,
            by_place,
            seed,
            beams=8,
            width=2,
            aggregate=aggregate,
            distinct=True,
            scorer=lambda q, t: table[tuple(t.text.split())],  # noqa: B023
            finished=lambda text: len(text.split()) == 3,
        )
        assert tuple(answer.text.split()) == best


def test_a_narrow_beam_by_hand() -> None:
    """One beam, two ways: greedy. l scores more at first, and what follows it less."""
    score = {"l": 0.6, "r": 0.5, "l l": 0.2, "l r": 0.3, "r l": 0.9, "r r": 0.9}
    options: dict[str, Any] = {"width": 2, "distinct": True, "scorer": lambda q, t: score[" ".join(t.text.split())]}
    greedy, _, _, seconds = run_of(beam_search, by_place, beams=1, **options)
    assert greedy.text == "l\n\nr"
    assert greedy.summary["calls"] == 4 and greedy.summary["tokens_critical"] == 4 == seconds
    two, _, _, _ = run_of(beam_search, by_place, beams=2, **options)
    assert two.text == "r\n\nl" and two.summary["calls"] == 4 + 4


def test_trees_do_not_wait_for_each_other() -> None:
    def script(request: Request, draw: random.Random) -> Line:
        line = by_place(request, draw)
        slow = request.path[0] == "tree 1"
        return Line(text=line.text, tokens=20 if slow else 2)

    answer, run, _, seconds = run_of(
        dvts, script, trees=2, width=2, scorer=lambda q, t: 0.9 if "r" in t.text else 0.5, selection="weighted"
    )
    for node in run.graph.nodes.values():
        tree = node.name.split("/")[0]
        assert all(name.startswith(tree) for name in (*node.reads, *node.waits))
    assert answer.summary["calls"] == 8 and answer.summary["tokens_critical"] == 40 == seconds
    assert run.graph.nodes["tree 0/step 1#0"].end == 4.0


def test_a_step_that_runs_out_of_tokens_is_no_answer() -> None:
    answer, _, _, _ = run_of(beam_search, beams=1, width=2, step_tokens=2, parameters=Parameters(max_tokens=100))
    assert answer.answer is None and answer.summary["truncated"] == 2


def test_a_budget_leaves_the_texts_so_far() -> None:
    for strategy in (particle_filtering, beam_search):
        answer, _, _, _ = run_of(strategy, budget=Budget(calls=18), finished=lambda text: False)
        assert answer.stopped == "budget" and answer.text


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"separator": ""}, "separator=''"),
        ({"particles": 0}, "particles=0"),
        ({"scorer": lambda question, trace: 1.5}, r"gave call step 0#\d a score of 1.5; return a number from 0 to 1"),
    ],
)
def test_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        run_of(particle_filtering, **knobs)


def test_confidence_stands_in_for_a_scorer() -> None:
    def script(request: Request, draw: random.Random) -> Line:
        return Line(text="x y", tokens=2, confidence=(float(request.sample),) * 2)

    answer, _, _, _ = run_of(beam_search, script, beams=1, width=4, scorer=None)
    assert answer.calls == ("step 0#3",)
    with pytest.raises(UnsupportedError, match="without log-probabilities"):
        run_of(beam_search, scorer=None)
