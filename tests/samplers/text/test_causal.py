"""The lean loop of causal models against the general one: tokens, events, tallies and noise are the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from partsong.kernels import few_rows
from partsong.ledger import Ledger
from partsong.samplers.text.causal import CausalLoop, is_plainly_causal
from partsong.samplers.text.decode import Decoded, decode, decode_steps
from partsong.samplers.text.events import Step
from partsong.samplers.text.families import ADAPTERS, DECODERS
from partsong.samplers.text.request import check_request
from partsong.samplers.text.runner import StockTextModel
from tests.samplers.text import plain
from tests.samplers.text.test_decode import prompts
from tests.samplers.text.test_runner import VOCAB, decoder

RULES = ["quota", "llada", "threshold", "factor", "entropy", "entropy-bound", "kl-stable", "hierarchy"]


def steps_of(model: Any, rows: Any, **options: Any) -> tuple[list[Step], Decoded]:
    steps = decode_steps(model, rows, **options)
    seen = list[Step]()
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as end:
            return seen, end.value


def generally(monkeypatch: pytest.MonkeyPatch, model: Any, rows: Any, **options: Any) -> tuple[list[Step], Decoded]:
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[decode.__module__], "is_plainly_causal", lambda request: False)
        return steps_of(model, rows, **options)


def causal(kind: str = "llama", attention: str = "sdpa") -> StockTextModel:
    return StockTextModel(decoder(kind, attention), ADAPTERS["causal"], eos_token_ids=(3,))


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [(kind, 0.8) for kind in DECODERS]
    + [pytest.param(kind, 0.0, marks=() if kind == "llama" else pytest.mark.full) for kind in DECODERS],
)
def test_every_decoder(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows that end at their own stop tokens, with layers that read weights in halves."""
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    model = causal(kind)
    rows = [[5, 6, 7, 8, 9, 10, 11], [4], [12, 13, 14], [1, 2]]
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": temperature,
        "seed": 7,
        "stop_token_ids": [3, 20, 21, 22],
    }
    steps, decoded = steps_of(model, rows, **options)
    assert (steps, decoded) == generally(monkeypatch, model, rows, **options)
    assert len({len(tokens) for tokens in decoded.tokens}) > 1 or temperature == 0


@pytest.mark.parametrize(
    ("rule", "cache"),
    [
        pytest.param(rule, cache, marks=() if (row + column) % 2 else pytest.mark.full)
        for row, rule in enumerate(RULES)
        for column, cache in enumerate(("prefix", "dual"))
    ],
)
def test_every_rule_that_decides(rule: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = causal("qwen3", "eager"), prompts(3, seed=2)
    rows = [[token % VOCAB for token in row] for row in rows]
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "rule": rule, "cache": cache, "seed": [1, 2, 3]}
    assert is_plainly_causal(check_request(model, rows, **options))
    assert steps_of(model, rows, **options) == generally(monkeypatch, model, rows, **options)


def test_beginnings_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may have nothing to fill, and a stop token that was given ends nothing."""
    model, rows = causal(), [[4, 5], [6], [7, 8, 9]]
    for template, new in (([[8, 9], [], [3]], 5), ([[None, None], [1, 3], [3, None]], 0)):
        options: dict[str, Any] = {
            "template": template,
            "max_new_tokens": new,
            "temperature": 0.9,
            "stop_token_ids": [3, 5],
        }
        steps, decoded = steps_of(model, rows, **options)
        assert (steps, decoded) == generally(monkeypatch, model, rows, **options)
    assert (decoded.tokens[1], decoded.stopped[1], steps[0].finished[:1]) == ([1, 3], "stop token", (1,))


@pytest.mark.parametrize("watched", [True, False])
def test_steps_and_the_ledger(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "watched": watched}
    with Ledger() as lean:
        one = steps_of(causal(), [[1, 2], [3]], **options)
    with Ledger() as general:
        assert one == generally(monkeypatch, causal(), [[1, 2], [3]], **options)
    names = ("forwards", "flops")
    assert [lean.summary()[name] for name in names] == [general.summary()[name] for name in names]
    assert bool(one[0][0].events) == watched


def test_the_general_loop_does_the_rest() -> None:
    masked = StockTextModel(plain.llama(), ADAPTERS["mdlm"], mask_token_id=plain.MASK)
    assert not is_plainly_causal(check_request(masked, [[1]]))
    for cache in ("none", "prefix:refresh_every=2", "delayed"):
        assert not is_plainly_causal(check_request(causal(), [[1]], cache=cache))


def test_it_is_the_loop_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[int]()
    begin = CausalLoop.__iter__
    monkeypatch.setattr(CausalLoop, "__iter__", lambda self: ran.append(1) or begin(self))
    decode(plain.llama(), [[1, 2]], max_new_tokens=2)
    assert ran == [1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_float32_is_transformers_generate(attention: str) -> None:
    """One row and several, whose weights are read in other ways than transformers reads them."""
    module: Any = decoder("llama", attention).float()
    rows = [[5, 6, 7], [8, 9]]
    for prompt, tokens in zip(rows, decode(module, rows, max_new_tokens=9, stop_token_ids=[]).tokens, strict=True):
        expected = module.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens == expected[0, len(prompt) :].tolist()
