"""The bound on total variation against enumerated texts, the head that predicts it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError, PartsongError
from partsong.evals.oracle.model import OracleModel, Support
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.samplers.text.decode import Decoded, decode, decode_steps
from partsong.samplers.text.dependence.folders import load_dependence, save_dependence
from partsong.samplers.text.dependence.head import DependenceHead, DependenceSettings, doubt_of, least_of_pairs
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.registry import parse_rule
from partsong.samplers.text.rule import within_pairs
from partsong.samplers.text.rules import VariationBound
from partsong.samplers.text.runner import StockTextModel
from tests.samplers.text import plain
from tests.samplers.text.test_rules import TASKS, drawn

FULL = TextAdapter(name="full", attention="full")
#: Three bits with an even sum: each two are independent, and all three are not.
PARITY = Support("parity", torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]))


def masked() -> StockTextModel:
    return StockTextModel(plain.llama(), FULL, mask_token_id=plain.MASK)


def matching(support: Support, text: list[int]) -> Tensor:
    """The valid texts that agree with the decided tokens."""
    tokens = torch.tensor(text)
    known = tokens != support.vocab_size - 1
    return support.texts[(support.texts[:, known] == tokens[known]).all(1)]


def apart(support: Support, text: list[int], chosen: list[int]) -> float:
    """The total variation of some positions' tokens drawn together from the same ones drawn by the model, enumerated.

    All combinations outside the support are what the product has left over.
    """
    texts = matching(support, text)
    seen, counts = texts[:, chosen].unique(dim=0, return_counts=True)
    joint = counts.double() / len(texts)
    single = torch.stack([(texts[:, i, None] == torch.arange(support.vocab_size)).double().mean(0) for i in chosen])
    product = torch.stack([single[k][seen[:, k]] for k in range(len(chosen))]).prod(0)
    return float((joint - product).abs().sum() + 1 - product.sum()) / 2


def steps_of(task: str, delta: float, num: int) -> tuple[list[tuple[int, list[int], list[int]]], Decoded]:
    """Row, text before and chosen positions of every step, as long as the text is valid; and the texts."""
    support = TASKS[task]
    model, made = OracleModel(support), list[tuple[int, list[int], list[int]]]()
    texts = {row: [model.mask_token_id] * support.length for row in range(num)}
    steps = decode_steps(
        model,
        [[]] * num,
        rule=VariationBound(delta=delta),
        probe=model.dependence_of,
        max_new_tokens=support.length,
        temperature=1.0,
    )
    while True:
        try:
            events = next(steps).events
        except StopIteration as end:
            return made, end.value
        for row, text in texts.items():
            mine = [event for event in events if event.row == row]
            if mine and len(matching(support, text)):
                made.append((row, list(text), [event.position for event in mine]))
            for event in mine:
                assert event.token is not None
                text[event.position] = event.token


@pytest.mark.parametrize(("task", "delta"), [("replace", 0.3), ("remove", 0.3), ("latin", 0.4), ("shuffle", 0.4)])
def test_no_step_is_further_from_the_joint_distribution_than_its_certificate(task: str, delta: float) -> None:
    support = TASKS[task]
    made, decoded = steps_of(task, delta, 40)
    sums, truths, largest = dict.fromkeys(range(40), 0.0), [], []
    for row, text, chosen in made:
        pairs = support.dependence(torch.tensor(text))[chosen][:, chosen].sum() / 2
        truth = apart(support, text, chosen)
        assert truth <= pairs + 1e-9 and pairs <= delta + 1e-9
        sums[row] += float(pairs)
        truths.append(truth)
        largest.append(len(chosen))
    assert max(truths) > 0.05 and max(largest) > 1  # there was something to bound
    valid = support.contains(torch.tensor(decoded.tokens)).tolist()
    for row, tally in enumerate(decoded.tallies):
        assert tally.variation is not None and tally.certificate is not None
        if valid[row]:
            assert tally.variation == pytest.approx(sums[row], abs=1e-9)


def test_texts_are_no_further_from_the_truth_than_their_certificates_in_the_mean() -> None:
    count, decoded = 2000, drawn("replace", VariationBound(delta=0.1), 2000)
    bounds = [tally.variation for tally in decoded.tallies]
    mean = sum(bound for bound in bounds if bound is not None) / count
    measured = TASKS["replace"].total_variation(torch.tensor(decoded.tokens))
    # A perfect sampler would measure 0.025 by chance.
    assert 0.05 < measured <= mean + 0.025
    assert decoded.summary()["variation"] == max(bound for bound in bounds if bound is not None)


def test_independent_pairs_take_two_steps_and_cost_nothing() -> None:
    pairs = drawn("pairs", VariationBound(), 200)
    assert pairs.steps == 2 and TASKS["pairs"].contains(torch.tensor(pairs.tokens)).all()
    assert pairs.summary()["variation"] == pytest.approx(0.0, abs=1e-9)
    assert drawn("pairs", "entropy-bound", 200).summary()["variation"] is None


def test_changes_that_do_not_add_up_are_not_seen() -> None:
    model = OracleModel(PARITY)
    rule = VariationBound(delta=0.0)
    decoded = decode(model, [[]] * 400, rule=rule, probe=model.dependence_of, max_new_tokens=3, temperature=1.0, seed=2)
    valid = float(PARITY.contains(torch.tensor(decoded.tokens)).double().mean())
    assert decoded.steps == 1 and decoded.summary()["variation"] == 0.0
    assert abs(valid - 0.5) < 0.1
    assert apart(PARITY, [2, 2, 2], [0, 1, 2]) == 0.5 and apart(PARITY, [2, 2, 2], [0, 2]) == 0.0


@pytest.mark.parametrize("task", ["replace", "latin", "pairs", "shuffle", "copy"])
def test_doubt_bounds_every_dependence(task: str) -> None:
    support = TASKS[task]
    text = torch.full((support.length,), support.vocab_size - 1)
    for known in range(3):
        if known:
            text[known] = support.texts[0, known]
        top = support.marginals(text).topk(2, dim=1).values
        limit = least_of_pairs(doubt_of(top[:, 0], top[:, 0] - top[:, 1])[None])[0]
        assert (support.dependence(text) <= limit + 1e-12).all()
    assert task != "pairs" or float(limit[5, 7]) == 0.5  # of bits it is the most there can be


@pytest.mark.parametrize("by", ["max_prob", "random"])
def test_checked_drafts_write_the_same_text_in_fewer_forwards(by: Literal["max_prob", "random"]) -> None:
    plainly, checked = (drawn("replace", VariationBound(by=by), 50, verify=verify) for verify in (0, 8))
    assert checked.tokens == plainly.tokens
    assert checked.summary()["tokens_per_forward_all"] > 1.5 * plainly.summary()["tokens_per_forward_all"]
    assert [tally.variation for tally in checked.tallies] == [tally.variation for tally in plainly.tallies]


def test_positions_are_taken_while_all_pairs_together_fit() -> None:
    shared = torch.tensor([[[0, 2, 1, 0], [2, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 0]]], dtype=torch.float64)
    score, among = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[True, True, True, True]])
    taken, total = within_pairs(shared, score, among, 2.0, together=True)
    # 0, then 1 for 2; 2 would make it 4 and 3 would make it 3.
    assert (taken.tolist(), total.tolist()) == ([[True, True, False, False]], [2.0])
    taken, total = within_pairs(shared, score, among, 1.0, together=True)
    assert (taken.tolist(), total.tolist()) == ([[True, False, True, False]], [1.0])  # 3 is 1 more
    taken, total = within_pairs(shared, score, among, 1.0, together=False)
    assert (taken.tolist(), total.tolist()) == ([[True, False, True, True]], [2.0])


# --- the head ---------------------------------------------------------------------------------------------------------


def head_of(**sizes: int) -> DependenceHead:
    torch.manual_seed(3)
    return DependenceHead(DependenceSettings(**{"hidden_size": 16, "vocab_size": 40, "width": 8, "rank": 4, **sizes}))


def test_a_head_predicts_no_more_than_doubt_allows() -> None:
    chance = torch.Generator().manual_seed(3)
    hidden, doubt = torch.randn(2, 5, 16, generator=chance), torch.rand(2, 5, generator=chance)
    doubt[0, 1] = 0.0
    pairs = head_of()(hidden, doubt)
    # A sigmoid of equal numbers may differ by a rounding, by where they lie in memory.
    assert torch.allclose(pairs, pairs.transpose(1, 2), rtol=1e-6)
    assert not pairs.diagonal(dim1=1, dim2=2).any()
    assert (pairs <= least_of_pairs(doubt)).all() and not pairs[0, 1].any()
    assert (pairs[1] > 0).sum() == 20


def test_a_saved_head_predicts_the_same(tmp_path: Path) -> None:
    head = head_of().half().float()
    save_dependence(head, tmp_path)
    hidden, doubt = torch.randn(1, 4, 16), torch.rand(1, 4)
    assert torch.equal(load_dependence(tmp_path)(hidden, doubt), head(hidden, doubt))
    assert json.loads((tmp_path / "dependence.json").read_text())["rank"] == 4


def test_a_head_decides_with_a_stock_model(tmp_path: Path) -> None:
    model = masked()
    width, vocab = model.head.weight.shape[1], model.vocab_size
    head = head_of(hidden_size=width, vocab_size=vocab)
    save_dependence(head, tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    one, few = (
        decode(model, [[1, 2]], rule=VariationBound(delta=delta, head=tmp_path), **options) for delta in (0.0, 1.0)
    )
    assert one.steps == 12 and few.steps < 12
    assert one.summary()["variation"] == 0.0 and (few.summary()["variation"] or 0.0) > 0.1
    text = f"variation-bound:delta=1,head={tmp_path}"
    assert decode(model, [[1, 2]], rule=text, **options).tokens == few.tokens


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_size": 3}, "predicts dependences of a model whose hidden_size is 3; that of this model is"),
        ({"vocab_size": 7}, "predicts dependences of a model whose vocab_size is 7; that of this model is"),
    ],
)
def test_a_head_of_another_model_is_refused(tmp_path: Path, sizes: dict[str, int], words: str) -> None:
    model = masked()
    own = {"hidden_size": model.head.weight.shape[1], "vocab_size": model.vocab_size}
    save_dependence(head_of(**{**own, **sizes}), tmp_path)
    refused(model, VariationBound(head=tmp_path), words)


def test_a_missing_or_broken_head_is_refused(tmp_path: Path) -> None:
    model = masked()
    refused(model, VariationBound(), "comes from no folder that may hold a head: give variation-bound:head=FOLDER")
    refused(model, VariationBound(head=tmp_path), "it has no dependence.json; zoo/recipes/train_dependence.py trains")
    save_dependence(head_of(), tmp_path)
    (tmp_path / "dependence.json").write_text('{"hidden_size": 0, "vocab_size": 40}')
    refused(model, VariationBound(head=tmp_path), "hidden_size=0; use a positive integer")
    (tmp_path / "dependence.json").write_text('{"hidden_size": 16, "vocab_size": 40}')
    refused(model, VariationBound(head=tmp_path), "holds no head that can be read: Error(s) in loading state_dict")


def test_other_refusals() -> None:
    model = OracleModel(oracle_tasks()["copy"])
    refused(model, VariationBound(), "OracleModel comes from no folder")
    refused(plain.llama(), VariationBound(), "VariationBound does not fit noise of the kind 'none'")
    for delta in ("1.5", "-0.1"):
        with pytest.raises(ArgumentError, match=f"delta={delta}; use a number from 0 to 1"):
            parse_rule(f"variation-bound:delta={delta}")


def refused(model: Any, rule: VariationBound, words: str) -> None:
    with pytest.raises(PartsongError) as caught:
        decode(model, [[1]], rule=rule, max_new_tokens=4)
    assert words in str(caught.value) and "\n" not in str(caught.value)
