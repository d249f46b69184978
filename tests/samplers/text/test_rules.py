"""Rules on a model that is never wrong: what they draw against all valid texts, and what they accept, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.oracle.model import OracleModel
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.kernels.token_divergence import token_divergence
from partsong.samplers.text.decode import decode
from partsong.samplers.text.registry import RULES, parse_cache, parse_rule
from partsong.samplers.text.rule import View
from partsong.samplers.text.rules import Dependency, Factor, Hierarchy, KLStable, Quota
from partsong.samplers.text.rules_revising import InsertDelete, Renoise, Revoke, TokenEditing

TASKS = oracle_tasks()
#: Texts drawn to compare distributions: by chance alone a perfect sampler would be 0.02 away (`total_variation`).
NUM = 3000
#: Rules with tests of their own below: one needs a probe, one looks at the step before.
ELSEWHERE = ("dependency", "kl-stable")
UNBIASED = [name for name, kind in RULES.items() if kind.unbiased and not kind.revises and name not in ELSEWHERE]


def drawn(task: str, rule: Any, count: int, temperature: float = 1.0, **more: Any) -> Any:
    support = TASKS[task]
    model = OracleModel(support)
    rule = parse_rule(rule) if isinstance(rule, str) else rule
    return decode(
        model,
        [[] for _ in range(count)],
        rule=rule,
        probe=model.probe_for(rule),
        max_new_tokens=support.length,
        block_size=support.length,
        temperature=temperature,
        seed=1,
        **more,
    )


#: Every rule and every task, and with --full together.
PAIRS = [
    pytest.param(rule, task, marks=() if row % 3 == column else pytest.mark.full)
    for row, rule in enumerate(UNBIASED)
    for column, task in enumerate(("replace", "insert", "remove"))
]


@pytest.mark.parametrize(("rule", "task"), PAIRS)
def test_draws_are_distributed_as_the_texts_are(rule: str, task: str) -> None:
    decoded = drawn(task, rule, NUM)
    assert TASKS[task].total_variation(torch.tensor(decoded.tokens)) <= 0.03
    assert RULES[rule].unbiased
    if rule != "quota":
        assert decoded.summary()["tokens_per_forward_all"] > 1.3


@pytest.mark.parametrize(
    "task", ["replace", *(pytest.param(task, marks=pytest.mark.full) for task in ("insert", "remove"))]
)
def test_choosing_by_the_drawn_token_is_biased(task: str) -> None:
    texts = torch.tensor(drawn(task, "llada", 1000).tokens)
    assert TASKS[task].contains(texts).all()
    assert TASKS[task].total_variation(texts) > 0.3
    assert not RULES["llada"].unbiased


def test_kl_stability_keeps_the_distribution() -> None:
    assert TASKS["replace"].total_variation(torch.tensor(drawn("replace", "kl-stable", NUM).tokens)) <= 0.03


@pytest.mark.parametrize(("task", "share"), [("replace", (7 / 8) ** 7), ("shuffle", 720 / 6**6), ("copy", 1.0)])
def test_all_at_once_is_as_often_right_as_chance_says(task: str, share: float) -> None:
    count = 1000
    decoded = drawn(task, Quota(per_step=16), count)
    valid = TASKS[task].contains(torch.tensor(decoded.tokens)).double().mean()
    assert decoded.steps == 1
    assert abs(float(valid) - share) <= 4 * (share * (1 - share) / count) ** 0.5


def test_independent_pairs_are_seen_by_a_probe_and_by_nothing_else() -> None:
    pairs = drawn("pairs", Dependency(budget=0.05), 200)
    assert TASKS["pairs"].contains(torch.tensor(pairs.tokens)).all()
    assert pairs.summary()["tokens_per_forward_all"] == 8.0
    assert drawn("pairs", "entropy-bound", 200).summary()["tokens_per_forward_all"] < 2.0


def test_parallel_shuffling_fails_and_the_bound_avoids_it() -> None:
    two, bound = (drawn("shuffle", rule, 500) for rule in ("quota:per_step=2", "entropy-bound"))
    assert TASKS["shuffle"].contains(torch.tensor(two.tokens)).double().mean() < 0.5
    assert TASKS["shuffle"].contains(torch.tensor(bound.tokens)).all()


# --- one step, by hand ------------------------------------------------------------------------------------------------


def view_of(max_prob: Sequence[float], *, undecided: Sequence[bool] | None = None, **more: Any) -> View:
    """One row; what is not given does not matter."""
    count = len(max_prob)
    probs = torch.tensor([max_prob], dtype=torch.float64)
    ones, zeros = torch.ones(1, count, dtype=torch.int64), torch.zeros(1, count, dtype=torch.int64)
    waits = torch.ones(1, count, dtype=torch.bool) if undecided is None else torch.tensor([undecided])
    base: dict[str, Any] = {
        "real": torch.ones(1, count, dtype=torch.bool),
        "index": torch.arange(count)[None],
        "block": zeros,
        "undecided": waits,
        "current": ones * 5,
        "token": ones * 7,
        "token_prob": probs,
        "argmax": ones * 8,
        "max_prob": probs,
        "margin": probs,
        "entropy": -probs.log(),
        "step": torch.zeros(1, dtype=torch.int64),
        "block_step": torch.zeros(1, dtype=torch.int64),
        "block_total": torch.tensor([count]),
        "eager": False,
        "length": count,
        "memory": {},
        "divergence": lambda: torch.zeros(1, count),
        "current_prob": None,
        "mutual_information": lambda: torch.zeros(1, count, count),
        "dependence": lambda: torch.zeros(1, count, count),
        "random": lambda name: torch.zeros(1, count),
        "random_token": lambda: ones * 3,
    }
    return View(**{**base, **more})


def places(mask: Tensor) -> list[int]:
    return mask[0].nonzero().flatten().tolist()


def test_a_quota_of_steps_is_dealt_out_with_the_remainder_first() -> None:
    probs = [0.1, 0.2, 0.3, 0.4, 0.5]
    taken = [
        len(places(Quota(steps=3).choose(view_of(probs, block_step=torch.tensor([step]))).write)) for step in range(3)
    ]
    assert taken == [2, 2, 1]


def test_factor_takes_the_most_that_hold() -> None:
    # n = 1 needs 0.5, n = 2 needs 0.667, n = 3 needs 0.75: the third fails its own, and all after it.
    assert places(Factor(factor=1.0).choose(view_of([0.7, 0.9, 0.7, 0.1])).write) == [0, 1]
    assert places(Factor(factor=1.0).choose(view_of([0.2, 0.3, 0.25])).write) == [1]


def test_hierarchy_takes_the_peak_of_every_run() -> None:
    waits = [True, True, False, True, True, True, False, True]
    view = view_of([0.6, 0.7, 1.0, 0.6, 0.5, 0.8, 1.0, 0.4], undecided=waits)
    assert places(Hierarchy(threshold=0.95, low_threshold=0.5).choose(view).write) == [1, 5]


def test_stability_is_waited_for() -> None:
    view = view_of([0.95, 0.96])
    rule = KLStable(history=2)
    assert places(rule.choose(view).write) == [1]  # nothing is settled yet: the surest alone
    assert places(rule.choose(view).write) == [0, 1]


def test_revoking_takes_back_fewer_than_it_drafts() -> None:
    waits = [True, True, True, False, False, False]
    checked = torch.tensor([[1.0, 1.0, 1.0, 0.1, 0.5, 0.2]])
    view = view_of([0.9, 0.8, 0.7, 1, 1, 1], undecided=waits, current_prob=checked)
    choice = Revoke().choose(view)
    assert places(choice.write) == [0, 1, 2]
    assert places(choice.undecided) == [3, 5]
    one = Revoke(at_least=1, at_most=1).choose(view)
    assert (places(one.write), places(one.undecided)) == ([0], [1, 2])


def test_editing_overwrites_and_ends_when_nothing_changes() -> None:
    view = view_of([0.96, 0.97, 0.99], undecided=[True, False, False], argmax=torch.tensor([[8, 5, 9]]))
    choice = TokenEditing().choose(view)
    assert places(choice.write) == [0, 2]
    assert choice.token[choice.write].tolist() == [7, 9]
    assert places(choice.pending) == [0, 1, 2]
    still = view_of([0.96, 0.97], undecided=[False, False], argmax=torch.tensor([[5, 5]]))
    assert places(TokenEditing().choose(still).pending) == []


def test_tokens_that_move_others() -> None:
    rule = InsertDelete(delete_token=1, split_token=2, threshold=0.5, editing_threshold=0.5)
    sure, decided = [0.9, 0.9, 0.9, 0.1, 0.05], [False, False, False, True, True]
    current = torch.tensor([[10, 11, 12, 0, 0]])
    gone = rule.choose(view_of(sure, undecided=decided, current=current, argmax=torch.tensor([[10, 1, 12, 9, 9]])))
    # 11 leaves and 12 and what was decided after it (7) move up; the last two are open.
    assert gone.token[0, :3].tolist() == [10, 12, 7]
    assert (places(gone.deleted), places(gone.undecided)) == ([1], [3, 4])
    opened = rule.choose(view_of(sure, undecided=decided, current=current, argmax=torch.tensor([[10, 2, 12, 9, 9]])))
    # A place opens before 11, and the last open one leaves for it.
    assert opened.token[0].tolist() == [10, -1, 11, 12, 7]
    assert (places(opened.inserted), places(opened.undecided)) == ([1], [1])
    full = rule.choose(
        view_of(sure[:3], undecided=[False] * 3, current=current[:, :3], argmax=torch.tensor([[2, 2, 2]]))
    )
    assert not full.undecided.any() and not full.write.any()  # nothing may leave, so nothing opens


def test_noise_is_renewed_until_the_text_stands_still() -> None:
    sure = view_of([0.9999, 0.9999], argmax=torch.tensor([[7, 7]]))
    rule = Renoise()
    first, second = rule.choose(sure), rule.choose(sure)
    assert (places(first.pending), places(second.pending)) == ([0, 1], [])
    unsure = rule.choose(view_of([0.999, 0.2, 0.3]))
    assert unsure.token[0].tolist() == [7, 3, 7]  # 0.001 nats, then 1.2, and 1.6 would come after more than 0.1
    last = rule.choose(view_of([0.2, 0.3], block_step=torch.tensor([47])))
    assert (last.token[0].tolist(), places(last.pending)) == ([8, 8], [])


def test_divergence_is_that_of_the_softmaxes() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, w = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((5, 6), (5, 6), (9000, 6)))
    bias = torch.zeros(9000, dtype=torch.float64)
    bias[3] = -torch.inf
    p, q = ((4 * (x @ w.T / 4).tanh() + bias).log_softmax(-1) for x in (a, b))
    expected = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)
    torch.testing.assert_close(token_divergence(a, b, w, bias=bias, softcap=4.0), expected, rtol=1e-10, atol=1e-12)


# --- names and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("entropy-bond", "no rule 'entropy-bond'; did you mean entropy-bound? The rules are entropy-bound"),
        ("threshold:threshold=1.5", "threshold=1.5; use a number from 0 to 1"),
        ("quota:per_step=0", "per_step=0; use a positive integer"),
        ("quota:by=loud", "by='loud'; use max_prob, margin, entropy, random or left"),
        ("factor:factor=0", "factor=0.0; use a number above 0"),
        ("hierarchy:low_threshold=0.95", "low_threshold=0.95; use a number from 0 to 0.92"),
        ("revoke:at_least=9,at_most=3", "at_most=3; use an integer of 9 or more"),
    ],
)
def test_refused_knobs(rule: str, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_rule(rule)
    assert words in str(caught.value)


def test_refused_caches() -> None:
    with pytest.raises(ArgumentError, match="the caches are none, prefix, dual, delayed, vicinity"):
        parse_cache("full")
    with pytest.raises(ArgumentError, match="refresh_every=0"):
        parse_cache("dual:refresh_every=0")
    with pytest.raises(UnsupportedError, match="keep no keys; use cache='none'"):
        drawn("copy", "quota", 1, cache="dual")


def test_a_rule_that_needs_a_probe_says_so() -> None:
    support = TASKS["copy"]
    with pytest.raises(ArgumentError, match="needs probe="):
        decode(OracleModel(support), [[]], rule=Dependency(), max_new_tokens=8)
