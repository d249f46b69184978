"""Strategies that draw samples of one prompt, against theory and against the rule applied to the whole pool."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning import Completion, Line, Message, Parameters, Request, Run, ScriptedEngine, final_number
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import (
    STRATEGIES,
    adaptive_consistency,
    best_of_n,
    deepconf,
    self_certainty,
    self_consistency,
    short_m,
    single,
)
from partsong.reasoning.strategies.confidence import group_means, trace_score
from partsong.reasoning.strategies.deepconf import top_quantile
from tests.reasoning.scripts import guesses


def sure(request: Request, draw: random.Random) -> Line:
    """7 with a chance of 0.55, and then usually with more confidence."""
    right, tokens = draw.random() < 0.55, draw.randint(6, 40)
    mean = 6.0 if right else 4.5
    return Line(
        text=f"so {7 if right else draw.randint(8, 10)}",
        tokens=tokens,
        confidence=tuple(max(0.1, draw.gauss(mean, 1.5)) for _ in range(tokens)),
    )


def run_of(strategy: Any, seed: int = 0, script: Any = sure, **knobs: Any) -> Any:
    engine = ScriptedEngine(script, seconds_per_token=0.01, chunk=1)
    run = Run(engine, seed=seed)
    answer, _ = run_virtual(strategy(run, "q", **{"extract": final_number, **knobs}))
    return answer, run


def pool_of(seed: int, num: int) -> list[Completion]:
    """The samples a run of that seed draws, whole."""

    async def drawn() -> list[Completion]:
        run = Run(ScriptedEngine(sure), seed=seed)
        completions: dict[int, Completion] = {}
        chat = [Message("user", ("q",))]
        async with run.samples(chat, num, path=("sample",), parameters=Parameters(logprobs=20)) as samples:
            async for number, completion in samples:
                completions[number] = completion
        return [completions[i] for i in range(num)]

    return run_virtual(drawn())[0]


def best_named(weights: dict[str, float]) -> str:
    return max(weights, key=lambda answer: weights[answer])


def test_a_majority_is_right_as_often_as_the_binomial_says() -> None:
    """Five samples of two possible answers; 300 questions."""
    right, num, questions = 0.65, 5, 300
    theory = sum(math.comb(num, k) * right**k * (1 - right) ** (num - k) for k in range(3, num + 1))
    script = guesses(right, wrong=1)
    votes = [run_of(self_consistency, seed, script, num=num)[0].answer == "7" for seed in range(questions)]
    alone = [run_of(single, seed, script)[0].answer == "7" for seed in range(questions)]
    for counts, expected in ((votes, theory), (alone, right)):
        deviation = math.sqrt(expected * (1 - expected) / questions)
        assert abs(sum(counts) / questions - expected) < 3 * deviation


def test_one_call_is_the_first_sample_of_many() -> None:
    answer, _ = run_of(single, 4)
    assert answer.text == pool_of(4, 3)[0].text
    assert answer.summary["calls"] == 1


@pytest.mark.parametrize("seed", range(8))
def test_best_of_n_against_the_pool(seed: int) -> None:
    pool = pool_of(seed, 8)
    scores = [sum(completion.confidence or ()) / len(completion.confidence or ()) for completion in pool]
    answer, _ = run_of(best_of_n, seed, num=8)
    assert answer.calls == (f"sample#{scores.index(max(scores))}",)
    assert answer.summary["calls"] == 8 and answer.summary["tokens_cancelled"] == 0
    for power in (0.0, 0.7, 2.0):
        borda: dict[str, float] = {}
        for rank, i in enumerate(sorted(range(8), key=lambda i: -scores[i])):
            vote = str(final_number(pool[i].text))
            borda[vote] = borda.get(vote, 0.0) + (8 - rank) ** power
        assert run_of(best_of_n, seed, num=8, selection="borda", power=power)[0].answer == best_named(borda)
    # A power without end leaves the best one only.
    assert run_of(best_of_n, seed, num=8, selection="borda", power=60.0)[0].answer == answer.answer


def test_a_scorer_of_ones_own() -> None:
    async def long(completion: Completion) -> float:
        return float(completion.usage.completion)

    answer, run = run_of(best_of_n, 2, num=6, scorer=long)
    longest = max(run.graph.nodes.values(), key=lambda node: node.tokens)
    assert answer.calls == (longest.name,)
    assert longest.request.parameters.logprobs == 0
    with pytest.raises(UnsupportedError, match=r"sample#0 came back without log-probabilities"):
        run_of(best_of_n, 0, lambda request, draw: Line(text="7"), num=2)


@pytest.mark.parametrize("seed", range(10))
def test_short_m_against_the_pool(seed: int) -> None:
    pool = pool_of(seed, 10)
    order = sorted(range(10), key=lambda i: (pool[i].usage.completion, i))[:3]
    votes = [final_number(pool[i].text) for i in order]
    expected = max(dict.fromkeys(votes), key=votes.count)
    early, _ = run_of(short_m, seed, num=10, shortest=3)
    assert early.answer == expected
    assert early.details["lengths"] == [pool[i].usage.completion for i in order]
    assert early.summary["tokens_critical"] <= early.details["lengths"][-1] + 1
    full, _ = run_of(short_m, seed, num=10, shortest=3, early_stop=False)
    assert full.answer == expected and full.summary["tokens_total"] > early.summary["tokens_total"]


def test_adaptive_consistency_stops_at_four_to_none() -> None:
    """0.969 is the first value above 0.95 without dissent; calls follow each other."""
    answer, _ = run_of(adaptive_consistency, 0, lambda request, draw: Line(text="7", tokens=10))
    assert (answer.stopped, answer.summary["calls"]) == ("confident", 4)
    assert answer.details["confidence"] == pytest.approx(31 / 32)
    assert answer.summary["tokens_critical"] == answer.summary["tokens_total"] == 40
    wide, _ = run_of(adaptive_consistency, 0, lambda request, draw: Line(text="7", tokens=10), width=2)
    assert wide.summary["tokens_critical"] == 20 and wide.summary["calls"] == 5  # one more was under way


@pytest.mark.parametrize("seed", range(6))
def test_adaptive_consistency_against_the_pool(seed: int) -> None:
    pool = [str(final_number(completion.text)) for completion in pool_of(seed, 20)]
    for end in range(1, 21):
        first, second = [*(n for _, n in Counter(pool[:end]).most_common()), 0][:2]
        mass = sum(math.comb(first + second + 1, i) for i in range(first + 1)) / 2 ** (first + second + 1)
        # Whatever the others say: all alike for each answer there is, and for a new one.
        ends = [[*pool[:end], *[other] * (20 - end)] for other in (*pool[:end], "new")]
        if mass >= 0.95 or len({max(dict.fromkeys(votes), key=votes.count) for votes in ends}) == 1:
            break
    answer, _ = run_of(adaptive_consistency, seed, num=20)
    assert answer.details["votes"] == end
    assert answer.answer == Counter(pool[:end]).most_common()[0][0]


@pytest.mark.parametrize("score", ["mean", "tail", "bottom", "lowest"])
def test_deepconf_offline_against_the_pool(score: Any) -> None:
    for seed in range(4):
        pool = pool_of(seed, 12)
        scores = []
        for completion in pool:
            values = list(completion.confidence or ())
            groups = [sum(values[i : i + 5]) / 5 for i in range(len(values) - 4)]
            low = sorted(groups)[: max(1, len(groups) // 10)]
            scores.append(
                {
                    "mean": sum(values) / len(values),
                    "tail": sum(values[-5:]) / 5,
                    "bottom": sum(low) / len(low),
                    "lowest": min(groups),
                }[score]
            )
        # Linear quantile at 1 - 0.4 of 12 scores: place 6.6 of 0..11.
        ranked = sorted(scores)
        limit = ranked[6] + 0.6 * (ranked[7] - ranked[6])
        weights: dict[str, float] = {}
        for completion, worth in zip(pool, scores, strict=True):
            if worth >= limit:
                vote = str(final_number(completion.text))
                weights[vote] = weights.get(vote, 0.0) + worth
        answer, _ = run_of(deepconf, seed, num=12, top=0.4, online=False, score=score, group=5)
        assert answer.answer == best_named(weights)
        assert answer.details["kept"] == [i for i in range(12) if scores[i] >= limit]
        assert answer.details["threshold"] == pytest.approx(limit)


@pytest.mark.parametrize("seed", range(8))
def test_deepconf_online_against_the_pool(seed: int) -> None:
    """Threshold of six, then one after the other until the leader has 0.8; halted samples would not have voted."""
    pool = pool_of(seed, 24)
    scores = [min(group_means(completion.confidence or (), 4)) for completion in pool]
    limit = top_quantile(scores[:6], 0.5)
    weights: dict[str, float] = {}
    for drawn, (completion, worth) in enumerate(zip(pool, scores, strict=True), 1):
        if worth >= limit:
            vote = str(final_number(completion.text))
            weights[vote] = weights.get(vote, 0.0) + worth
        if drawn >= 6 and weights and max(weights.values()) / sum(weights.values()) >= 0.8:
            break
    answer, run = run_of(deepconf, seed, num=24, warmup=6, top=0.5, consensus=0.8, group=4, width=3)
    assert answer.answer == best_named(weights)
    assert answer.details["kept"] == [i for i in range(drawn) if scores[i] >= limit]
    halted = [n for n in run.graph.nodes.values() if n.completion and n.completion.finish == "halted"]
    for node in halted:
        whole = pool[node.request.sample]
        assert scores[node.request.sample] < limit and node.tokens <= whole.usage.completion
    assert {n.request.sample for n in halted} <= set(range(6, 24))


def test_a_trace_that_falls_is_halted_while_it_is_written() -> None:
    """By hand: sure for 10 tokens, then lost for 30; groups of 5; halted where the mean of five falls below 6."""

    def script(request: Request, draw: random.Random) -> Line:
        falls = request.sample >= 4
        return Line(text="so 8" if falls else f"so {7 + request.sample % 2}", tokens=40, confidence=_falling(falls))

    answer, run = run_of(deepconf, 0, script, num=6, warmup=4, top=1.0, consensus=1.0, group=5, width=1)
    # After 10 tokens of 8, four of 1 give a mean of (8 + 4) / 5 = 2.4, two (24 + 2) / 5 = 5.2.
    assert [run.graph.nodes[f"sample#{i}"].tokens for i in (4, 5)] == [12, 12]
    assert answer.details["kept"] == [0, 1, 2, 3]


def _falling(falls: bool) -> tuple[float, ...]:
    return (8.0,) * 10 + ((1.0,) if falls else (6.5,)) * 30


def test_scores_of_a_trace() -> None:
    completion = Completion(text="", confidence=(4.0, 2.0, 6.0, 8.0))
    assert self_certainty(completion) == 5.0
    assert trace_score(completion, "tail", 2) == 7.0
    assert trace_score(completion, "lowest", 2) == trace_score(completion, "bottom", 2) == 3.0
    assert trace_score(completion, "lowest", 100) == 5.0


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("self-consistency", {"num": 0}, "num=0; use a positive integer"),
        ("self-consistency", {"risk": 0.7}, "risk=0.7; use a number from 0 to 0.5"),
        ("self-consistency", {"risk": 0.1, "weight": len}, "votes of equal weight"),
        ("self-consistency", {"early_stop": 1}, "early_stop=1; use True or False"),
        ("self-consistency", {"weight": 3}, "weight=3; use a function"),
        ("adaptive-consistency", {"confidence": 0.4}, "confidence=0.4"),
        ("best-of-n", {"selection": "worst"}, "selection='worst'; use best or borda"),
        ("short-m", {"num": 3, "shortest": 4}, "shortest=4 of num=3"),
        ("deepconf", {"top": 0.0}, "top=0.0; use a number above 0 and up to 1"),
        ("deepconf", {"num": 8}, "warmup=16 of num=8"),
    ],
)
def test_refused_before_any_call(name: str, knobs: dict[str, Any], words: str) -> None:
    engine = ScriptedEngine(sure)
    with pytest.raises(ArgumentError, match=words):
        run_virtual(STRATEGIES[name](Run(engine), "q", extract=final_number, **knobs))
    assert engine.asked == []
