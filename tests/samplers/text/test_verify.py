"""Checked drafts: the text of one forward a step, token for token, in fewer forwards; and controls that must differ."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from partsong import seeds, zoo
from partsong.errors import PartsongError, UnsupportedError
from partsong.evals.oracle import suite
from partsong.evals.oracle.model import OracleModel
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.kernels.token_noise import gumbel
from partsong.samplers.text.block_decoder import BlockDecoder
from partsong.samplers.text.canvas import Canvas
from partsong.samplers.text.decode import Decoded, decode, decode_steps
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.rule import Choice, View
from partsong.samplers.text.rules import Quota
from partsong.samplers.text.runner import StockTextModel
from partsong.samplers.text.verify import VerifiedLoop
from tests.samplers.text import plain
from tests.samplers.text.checkpoints import CHECKPOINTS, random_weights, write
from tests.samplers.text.test_runner import masked_lm

FULL = TextAdapter(name="full", attention="full")
ADAPTERS = [
    FULL,
    TextAdapter(name="shifted", attention="full", shifted=True),
    TextAdapter(name="blocks", attention="block_causal", block_size=8),
    TextAdapter(name="shifted blocks", attention="block_causal", block_size=8, shifted=True),
    TextAdapter(name="after prompt", attention="block_causal", block_size=8, block_origin="prompt"),
]
#: Every rule that can be checked, with knobs at which it takes a few tokens of so unsure a model.
RULES = [
    *(f"quota:by={by}" for by in ("max_prob", "margin", "entropy", "random", "left")),
    *("quota:per_step=2,by=random", "quota:steps=3", "entropy-bound:gamma=2", "threshold:threshold=0.3"),
    *("factor:factor=2", "entropy:threshold=1.5", "hierarchy:threshold=0.4,low_threshold=0.2", "llada:per_step=2"),
]
TASKS = oracle_tasks()
LISTS = zoo.MODELS["lists-mdlm"]
needs_weights = pytest.mark.skipif(not (LISTS.folder / "config.json").is_file(), reason="the weights are not there")


def model_of(adapter: TextAdapter, seed: int = 0) -> StockTextModel:
    return StockTextModel(plain.llama(seed).double(), adapter, mask_token_id=plain.MASK)


def prompts(count: int, seed: int = 0, most: int = 9) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(plain.MASK) for _ in range(draw.randint(1, most))] for _ in range(count)]


def forwards_of(decoded: Decoded) -> int:
    return sum(tally.num_forwards for tally in decoded.tallies)


def assert_the_same(plainly: Decoded, checked: Decoded) -> None:
    """The same texts with the same account of them, in no more forwards."""
    assert checked.tokens == plainly.tokens
    assert checked.stopped == plainly.stopped
    for before, after in zip(plainly.tallies, checked.tallies, strict=True):
        assert after.num_forwards <= before.num_forwards
        assert after.num_tokens == before.num_tokens
        assert after.certificate == pytest.approx(before.certificate, abs=1e-9)
        assert after.rejected <= after.drafted


# --- token for token --------------------------------------------------------------------------------------------------


def one_at_a_time(module: Any, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """The surest place first, drawn with the noise that is documented, and nothing else of the loop."""
    tokens, own = [*prompt, *[plain.MASK] * count], seeds.derive(seed, "row", 0)
    for step in range(count):
        key = seeds.derive(own, "step", step)
        signed = torch.tensor([key - (1 << 64) if key >> 63 else key])
        probs = plain.probabilities(module, tokens, plain.sees_all(len(tokens)), False)
        place = plain.quota(1)(probs, [p for p, token in enumerate(tokens) if token == plain.MASK])[0]
        noise = gumbel(signed, torch.tensor([place]), 0, plain.VOCAB)[0].double()
        tokens[place] = int((probs[place].log() / temperature + noise).argmax())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("drafts", [1, 5, 30])
def test_drafts_change_nothing_of_a_plain_loop(drafts: int) -> None:
    model = model_of(FULL)
    options: dict[str, Any] = {"max_new_tokens": 11, "rule": "quota", "verify": drafts}
    for number, prompt in enumerate(prompts(2)):
        expected = one_at_a_time(model.module, prompt, 11, 0.6, number)
        assert decode(model, [prompt], temperature=0.6, seed=number, **options).tokens == [expected]
        coldly, _ = plain.fill(model.module, prompt, [None] * 11, plain.quota(1), block=32)
        assert decode(model, [prompt], **options).tokens == [coldly]


#: Every rule and every attention once, and with --full together.
PAIRS = [
    pytest.param(rule, adapter, marks=() if (row - column) % len(ADAPTERS) == 0 else pytest.mark.full)
    for row, rule in enumerate(RULES)
    for column, adapter in enumerate(ADAPTERS)
]


@pytest.mark.parametrize(("rule", "adapter"), PAIRS, ids=str)
def test_every_rule_and_every_attention(rule: str, adapter: TextAdapter) -> None:
    """Ragged batches, blocks that end within a chain of drafts, stop tokens, gaps, kept keys."""
    draw = random.Random(f"{adapter.name} {rule}")
    model, rows = model_of(adapter, seed=1), prompts(5, seed=2)
    cache = "none" if adapter.attention == "full" else draw.choice(["none", "prefix", "dual:refresh_every=1"])
    gaps = [draw.choice([None, None, draw.randrange(plain.MASK)]) for _ in range(7)]
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 12, "block_size": draw.choice([2, 4, 8]), "cache": cache}
        options |= {"open_blocks": draw.choice([1, 2]), "temperature": temperature, "seed": draw.randrange(99)}
        options |= {"stop_token_ids": draw.choice([[], [3, 9, 11]]), "template": [gaps] * 5, "rule": rule}
        assert_the_same(decode(model, rows, **options), decode(model, rows, verify=draw.randint(1, 9), **options))


@pytest.mark.parametrize("name", [*CHECKPOINTS, "bert", "modernbert"])
def test_every_family_of_masked_models(name: str, tmp_path: Path) -> None:
    if name in CHECKPOINTS:
        config, shapes, *_ = CHECKPOINTS[name]
        model = load_text_model(write(tmp_path, config, random_weights(shapes(config))), dtype=torch.float64)
    else:
        model = masked_lm(name)
    rows = [[1, 2, 3], [4, 5], [7, 8, 9, 10, 11]]
    options: dict[str, Any] = {"max_new_tokens": 14, "temperature": 0.8, "rule": "quota:by=random", "seed": 4}
    plainly, checked = decode(model, rows, **options), decode(model, rows, verify=4, **options)
    assert_the_same(plainly, checked)
    assert forwards_of(checked) < forwards_of(plainly)


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    model, rows = model_of(ADAPTERS[2]), prompts(6, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 15, "temperature": 1.0, "rule": "quota:by=random", "verify": 5}
    together = decode(model, rows, seed=list(range(6)), **options)
    for number, row in enumerate(rows):
        alone = decode(model, [row], seed=[number], **options)
        assert alone.tokens == [together.tokens[number]]
        assert alone.tallies[0].forwards == together.tallies[number].forwards
        assert alone.tallies[0].rows == together.tallies[number].rows


def gain_of_a_trained_model(rule: str, temperature: float, count: int) -> float:
    """How many times fewer the forwards are, of some of the zoo's own questions."""
    model = load_text_model("lists-mdlm", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(LISTS.folder)
    asked = [tokenizer.encode(example.prompt) for example in zoo.lists.examples(count, seed=8)]
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "rule": rule, "seed": 2}
    plainly, checked = decode(model, asked, **options), decode(model, asked, verify=8, **options)
    assert_the_same(plainly, checked)
    return forwards_of(plainly) / forwards_of(checked)


@needs_weights
@pytest.mark.parametrize(
    ("rule", "temperature", "gain"),
    [
        pytest.param("quota", 0.0, 1.8, marks=pytest.mark.full),
        ("quota:by=random", 1.0, 2.5),
        pytest.param("entropy-bound", 0.7, 1.1, marks=pytest.mark.full),
    ],
)
def test_a_trained_model(rule: str, temperature: float, gain: float) -> None:
    assert gain_of_a_trained_model(rule, temperature, 8) > gain


@needs_weights
@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rule", ["quota", "quota:by=random", "entropy-bound"])
def test_a_trained_model_on_many_prompts(rule: str, temperature: float) -> None:
    assert gain_of_a_trained_model(rule, temperature, 100) > 1.0


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_forwards_and_rows_are_those_of_a_count_by_hand() -> None:
    """Of a text that is certain every draft is right: one token, then four a forward, of which the last is drawn."""
    one = decode(OracleModel(TASKS["copy"]), [[]], rule="quota", max_new_tokens=8, verify=3, temperature=1.0)
    whole = one.summary()
    assert whole["forwards"]["denoise"] == forwards_of(one) == one.steps == 3
    # The text; it and three drafts; it and two, because the third would be done.
    assert (whole["rows"], whole["tokens_drafted"], whole["tokens_rejected"]) == (1 + 4 + 3, 5, 0)
    assert decode(OracleModel(TASKS["copy"]), [[]], rule="quota", max_new_tokens=8).summary()["rows"] == 8


def test_every_token_is_the_texts_own_or_an_accepted_draft() -> None:
    for temperature in (0.0, 1.0):
        decoded = decode(model_of(FULL), prompts(8), rule="quota", max_new_tokens=14, temperature=temperature, verify=4)
        for tally in decoded.tallies:
            assert tally.num_tokens == 14 == tally.num_forwards + tally.drafted - tally.rejected
            assert tally.rows == tally.num_forwards + tally.drafted
            assert tally.rejected > 0


def test_batches_call_the_model_once_a_step() -> None:
    model, calls = model_of(FULL), []
    forward = model.forward

    def noted(tokens: Tensor, *args: Any, **named: Any) -> Tensor:
        calls.append(len(tokens))
        return forward(tokens, *args, **named)

    model.forward = noted  # type: ignore[method-assign]
    decoded = decode(model, prompts(5), rule="quota:by=random", max_new_tokens=10, temperature=1.0, verify=4)
    assert len(calls) == decoded.steps == max(tally.num_forwards for tally in decoded.tallies)
    assert sum(calls) == sum(tally.rows for tally in decoded.tallies)


def test_events_are_those_of_the_steps() -> None:
    model, rows = model_of(FULL), [[1, 2, 3], [4]]
    steps, seen = decode_steps(model, rows, rule="quota:by=random", max_new_tokens=9, block_size=5, verify=3), []
    texts: dict[int, list[int | None]] = {row: [None] * 9 for row in range(2)}
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as end:
            decoded = end.value
            break
        for event in seen[-1].events:
            place = event.position - len(rows[event.row])
            assert (event.kind, texts[event.row][place]) == ("commit", None)
            texts[event.row][place] = event.token
        for row, tokens in seen[-1].tokens.items():
            assert texts[row] == tokens
            assert None not in tokens[: seen[-1].stable[row]]
    assert [texts[0], texts[1]] == decoded.tokens
    assert max(len(step.events) for step in seen) > 2
    assert sorted(row for step in seen for row in step.finished) == [0, 1]


def test_generate_checks_drafts_too() -> None:
    module: Any = plain.llama(pad_token_id=0).double()
    ids = torch.tensor([[1, 2, 3]])
    module.config.mask_token_id = plain.MASK
    texts, calls = [], []
    for verify in (0, 4):
        decoder = BlockDecoder(adapter="mdlm", rule="quota", verify=verify, seed=5)
        more: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.9}
        texts.append(module.generate(ids, max_new_tokens=9, custom_generate=decoder, **more).tolist())
        assert decoder.last is not None
        calls.append(forwards_of(decoder.last))
    assert texts[0] == texts[1]
    assert calls[1] < calls[0] == 9


# --- distributions, and controls --------------------------------------------------------------------------------------


def drawn(task: str, count: int, verify: int = 8, rule: str = "quota:by=random", seed: int = 1) -> Decoded:
    support = TASKS[task]
    options: dict[str, Any] = {"max_new_tokens": support.length, "block_size": support.length, "seed": seed}
    return decode(OracleModel(support), [[]] * count, rule=rule, temperature=1.0, verify=verify, **options)


@pytest.mark.full
@pytest.mark.parametrize("task", ["replace", "insert"])
def test_draws_are_distributed_as_the_texts_are(task: str) -> None:
    decoded = drawn(task, 2500)
    texts = torch.tensor(decoded.tokens)
    assert TASKS[task].contains(texts).all()
    assert TASKS[task].total_variation(texts) <= 0.03
    assert decoded.tokens[:300] == drawn(task, 300, verify=0).tokens


@pytest.mark.full
def test_three_tokens_a_forward_without_an_error() -> None:
    """The default rule has 1.87 tokens a forward at this quality (benchmarks/results/oracle/2026-11-22.md)."""
    rows = suite.run(rules=["quota:by=random"], num=40, verify=16)
    assert {(row["valid"], row["verify"]) for row in rows} == {(1.0, 16)}
    assert rows[-1]["tokens_per_forward"] == pytest.approx(3.2, abs=0.15)
    assert rows[-1]["rows_per_forward"] < 6
    each = [row["tokens_per_forward"] for row in rows[:-1]]
    assert rows[-1]["tokens_per_forward"] == pytest.approx(math.prod(each) ** (1 / len(each)))


def test_a_draft_that_is_not_checked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {task: drawn(task, 100, verify=0).tokens for task in ("shuffle", "insert")}
    assert all(drawn(task, 100).tokens == texts for task, texts in expected.items())
    monkeypatch.setattr(Canvas, "equals", lambda own, rows, other, those: torch.ones_like(rows, dtype=torch.bool))
    for task, texts in expected.items():
        unchecked = drawn(task, 100).tokens
        assert sum(a != b for a, b in zip(unchecked, texts, strict=True)) > 20
        assert TASKS[task].contains(torch.tensor(unchecked)).double().mean() < 0.9


def test_a_draft_with_other_noise_is_worse_but_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that share the noise of what they foresee are accepted more often; the texts are the same."""
    shared, draft = drawn("shuffle", 100), VerifiedLoop._draft

    def other(self: VerifiedLoop, seen: Any) -> Any:
        kept, self.views.seeds = self.views.seeds, [seeds.derive(seed, "other") for seed in self.views.seeds]
        drafts = draft(self, seen)
        self.views.seeds = kept
        return drafts

    monkeypatch.setattr(VerifiedLoop, "_draft", other)
    unshared = drawn("shuffle", 100)
    assert unshared.tokens == shared.tokens
    assert forwards_of(unshared) > 1.2 * forwards_of(shared)


# --- refusals ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Diary(Quota):
    """Remembers something, and does not say so."""

    unbiased: ClassVar[bool] = True

    def choose(self, view: View) -> Choice:
        """Takes the surest, after a note."""
        view.noted("places", 0)
        return super(Diary, self).choose(view)


@pytest.mark.parametrize(
    ("adapter", "options", "words"),
    [
        (FULL, {"rule": "token-editing"}, "TokenEditing revises tokens, which the rows of one forward cannot repeat"),
        (FULL, {"rule": "kl-stable"}, "KLStable compares a step with the last"),
        (FULL, {"rule": "dependency", "probe": lambda *_: None}, "Dependency needs a probe"),
        (FULL, {"cache": "prefix"}, "PrefixCache keeps keys of the previous step"),
        (ADAPTERS[2], {"cache": "dual"}, "DualCache keeps keys of the previous step"),
        (ADAPTERS[2], {"cache": "delayed:refresh_every=2"}, "DelayedCache keeps keys of the previous step"),
        (FULL, {"verify": -1}, "verify=-1; use an integer of 0 or more"),
        (FULL, {"verify": 1.5}, "verify=1.5; use an integer of 0 or more"),
        (TextAdapter(name="c", attention="causal", shifted=True, noise="none"), {}, "the family 'c' has none"),
    ],
)
def test_refused_before_a_forward(adapter: TextAdapter, options: dict[str, Any], words: str) -> None:
    model = model_of(adapter)
    model.forward = None  # type: ignore[method-assign, assignment]
    with pytest.raises(PartsongError) as caught:
        decode(model, [[1, 2]], **{"verify": 3, **options})
    assert words in str(caught.value)


def test_a_rule_that_remembers_is_caught() -> None:
    with pytest.raises(UnsupportedError, match="Diary remembers earlier steps"):
        decode(model_of(FULL), [[1]], rule=Diary(), max_new_tokens=4, verify=2)
    assert len(decode(model_of(FULL), [[1]], rule=Diary(), max_new_tokens=4).tokens[0]) == 4


def test_the_suite_refuses_before_it_measures() -> None:
    with pytest.raises(UnsupportedError, match="KLStable"):
        suite.run(rules=["quota", "kl-stable"], num=1, verify=2)
    assert {rule for rule, _ in suite.cases(verify=3)} == {rule for rule, _ in suite.VERIFIED}
    assert suite.cases()[-len(suite.VERIFIED) :] == list(suite.VERIFIED)
