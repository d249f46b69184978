"""Logits that are no numbers end the row that has them, named in one line; the other rows are those without it."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation import LogitsProcessorList, SuppressTokensLogitsProcessor

from partsong.errors import NotANumberError
from partsong.kernels.speculation.draft import DraftTree
from partsong.samplers.any_order.jacobi import decode_jacobi
from partsong.samplers.text.any_order import decode_any_order
from partsong.samplers.text.block_decoder import BlockDecoder
from partsong.samplers.text.decode import Decoded, decode
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.registry import RULES
from partsong.samplers.text.runner import StockTextModel
from partsong.samplers.text.speculative_decoder import SpeculativeDecoder
from tests.reasoning.drafters import Guessing
from tests.samplers.text import plain

#: The token whose embedding is broken, and prompts of which the second holds it; token 0 is what shorter rows pad with.
BAD, ROWS, GOOD = 38, [[3, 4, 5], [6, 38, 8, 9], [7], [1, 2, 3, 4, 5, 6]], [0, 2, 3]
KNOBS = {
    "insert-delete": "insert-delete:delete_token=30,split_token=31",
    "soft-tokens": "soft-tokens:threshold=0.3",
    "token-editing": "token-editing:threshold=0.3,editing_threshold=0.25,max_post_steps=3",
    "entropy-bound": "entropy-bound:gamma=2",
}
MASKED = [KNOBS.get(name, name) for name, kind in RULES.items() if "mask" in kind.noise]


def broken(token: int, value: float = torch.nan, **more: Any) -> LlamaForCausalLM:
    """A model that computes no numbers after one token, and every other text as the same model without the fault."""
    module = plain.llama(**more).double()
    with torch.no_grad():
        module.get_input_embeddings().weight[token] = value
    return module


def masked(module: LlamaForCausalLM) -> StockTextModel:
    return StockTextModel(module, TextAdapter(name="full", attention="full"), mask_token_id=plain.MASK)


def check(decoded: Decoded, row: int, position: int, caplog: Any) -> None:
    """One row is named in one line, in its result and in the log, and claims nothing."""
    line = decoded.stopped[row]
    assert line.startswith(f"no token for position {position} of row {row}: ")
    assert "\n" not in line
    assert [record.getMessage() for record in caplog.records] == [line]
    assert decoded.tallies[row].certificate is None and decoded.tallies[row].variation is None
    assert decoded.summary()["certificate"] is None
    with pytest.raises(NotANumberError, match=re.escape(line)):
        decoded.check()


#: Every rule, each with one setting; with --full all with all.
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"verify": 2}, {"cache": "prefix"}]
CASES = [
    pytest.param(rule, options, marks=() if row % 4 == column else pytest.mark.full)
    for row, rule in enumerate(MASKED)
    for column, options in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("rule", "options"), CASES, ids=str)
def test_a_broken_row_of_a_masked_model(rule: str, options: dict[str, Any], caplog: Any) -> None:
    model = masked(broken(BAD))
    kind = RULES[rule.partition(":")[0]]
    if "verify" in options and (kind.revises or kind.remembers or kind.probes):
        options = {}
    if kind.probes or kind.weighs:
        options = {
            **options,
            "probe": lambda hidden, positions, rows: hidden.new_zeros(*hidden.shape[:2], hidden.shape[1]),
        }
    options = {"rule": rule, "max_new_tokens": 9, "block_size": 4, **options}
    with caplog.at_level(logging.WARNING):
        decoded = decode(model, ROWS, seed=[1, 2, 3, 4], **options)
    alone = decode(model, [ROWS[row] for row in GOOD], seed=[1, 3, 4], **options)
    assert [decoded.tokens[row] for row in GOOD] == alone.tokens
    assert [decoded.tallies[row] for row in GOOD] == alone.tallies
    assert decoded.tokens[1] == []
    check(decoded, 1, len(ROWS[1]), caplog)


@pytest.mark.parametrize("verify", [0, 3])
def test_a_text_that_breaks_on_the_way_keeps_its_beginning(verify: int, caplog: Any) -> None:
    """The token that breaks the model is one that the text itself writes, from left to right."""
    rule, clean = "quota:by=left", masked(plain.llama().double())
    whole = decode(clean, [[3, 4, 5]], rule=rule, max_new_tokens=8).tokens[0]
    place = next(place for place in range(2, 8) if whole[place] not in whole[:place] + ROWS[0] + ROWS[2])
    options = {"rule": rule, "max_new_tokens": 8, "verify": verify}
    model = masked(broken(whole[place]))
    with caplog.at_level(logging.WARNING):
        decoded = decode(model, [[7], [3, 4, 5]], **options)
    assert decoded.tokens[1] == whole[: place + 1]
    line = f"no token for position {3 + place + 1} of row 1: "
    assert decoded.stopped[1].startswith(line)
    assert any(record.getMessage().startswith(line) for record in caplog.records)
    assert decoded.tokens[0] == decode(model, [[7]], **options).tokens[0]


@pytest.mark.parametrize("speculate", [None, "ngram", "jacobi:window=3"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [BAD, 0])
def test_a_broken_row_of_a_causal_model(bad: int, temperature: float, speculate: str | None, caplog: Any) -> None:
    rows = [[bad if token == BAD else token for token in row] for row in ROWS]
    model, options = broken(bad), {"max_new_tokens": 6, "temperature": temperature}
    with caplog.at_level(logging.WARNING):
        decoded = decode(model, rows, seed=[1, 2, 3, 4], speculate=speculate, **options)
    alone = [decode(model, [rows[row]], seed=[row + 1], **options) for row in GOOD]
    assert [decoded.tokens[row] for row in GOOD] == [one.tokens[0] for one in alone]
    assert [decoded.tallies[row].certificate for row in GOOD] == [0.0] * 3
    assert decoded.tokens[1] == []
    check(decoded, 1, len(ROWS[1]), caplog)


def test_a_causal_text_that_breaks_on_the_way_keeps_its_beginning(caplog: Any) -> None:
    whole = decode(plain.llama().double(), [[3, 4, 5]], max_new_tokens=8).tokens[0]
    place = next(place for place in range(2, 8) if whole[place] not in whole[:place])
    with caplog.at_level(logging.WARNING):
        decoded = decode(broken(whole[place]), [[3, 4, 5]], max_new_tokens=8, speculate="jacobi")
    assert decoded.tokens == [whole[: place + 1]]
    check(decoded, 0, 3 + place + 1, caplog)


def test_a_wrong_guess_that_breaks_the_model_changes_nothing() -> None:
    """The keys of rejected guesses are hidden from the text, but a NaN times a weight of 0 would spoil it."""
    model = broken(BAD)
    expected = decode(model, [[3, 4, 5], [7]], max_new_tokens=6)
    guesses = Guessing(
        guess=lambda tokens, room: DraftTree.chain([BAD, BAD][:room]) if len(tokens) % 2 else DraftTree()
    )
    assert decode(model, [[3, 4, 5], [7]], max_new_tokens=6, speculate=guesses).tokens == expected.tokens


def test_float16_that_overflows(caplog: Any) -> None:
    module = plain.llama()
    with torch.no_grad():
        for linear in (module.model.layers[0].mlp.up_proj, module.model.layers[0].mlp.gate_proj):
            linear.weight.mul_(2e4)
    assert decode(module, [[3, 4]], max_new_tokens=3).stopped == ["length"]
    with caplog.at_level(logging.WARNING):
        decoded = decode(module.half(), [[3, 4]], max_new_tokens=3)
    assert "use bfloat16 or float32" in decoded.stopped[0]
    check(decoded, 0, 2, caplog)


def test_a_head_that_forbids_every_token(caplog: Any) -> None:
    module = plain.llama()
    module.lm_head.bias = torch.nn.Parameter(torch.full((plain.VOCAB,), -torch.inf))
    for model in (module, masked(module)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            decoded = decode(model, [[3, 4]], max_new_tokens=3)
        assert "every token is forbidden" in decoded.stopped[0]
        check(decoded, 0, 2, caplog)


@pytest.mark.parametrize("sample", [False, True])
def test_generate_ends_the_row_and_says_so(sample: bool, caplog: Any) -> None:
    module = broken(BAD, pad_token_id=0)
    ids = torch.tensor([[0, 3, 4, 5], [6, 38, 8, 9], [1, 2, 3, 4]])
    call = {"max_new_tokens": 5, "do_sample": sample, "top_k": 0, "attention_mask": (ids > 0).long()}
    for decoder in (SpeculativeDecoder(), SpeculativeDecoder(speculate=None), BlockDecoder()):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            out = module.generate(ids, custom_generate=decoder, **call)
        ours = [record.getMessage() for record in caplog.records if record.name == "partsong.samplers"]
        assert [line[:33] for line in ours] == ["no token for position 4 of row 1:"]
        assert out[1, 4:].tolist() == [0] * 5
        again = module.generate(
            ids[:1], custom_generate=decoder, **{**call, "attention_mask": call["attention_mask"][:1]}
        )
        assert torch.equal(again[0], out[0])


def test_a_processor_that_forbids_every_token(caplog: Any) -> None:
    module = plain.llama(pad_token_id=0).double()
    suppress = LogitsProcessorList([SuppressTokensLogitsProcessor(list(range(plain.VOCAB)))])
    with caplog.at_level(logging.WARNING):
        module.generate(
            torch.tensor([[3, 4]]), max_new_tokens=4, logits_processor=suppress, custom_generate=SpeculativeDecoder()
        )
    assert "position 2 of row 0: every token is forbidden" in caplog.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_in_any_order(temperature: float) -> None:
    def model(tokens: Any, rank: Any, places: Any, seen: Any) -> Any:
        logits = torch.zeros(*places.shape, 5)
        return logits.masked_fill(((places == 2) & (torch.arange(2)[:, None] == 1))[..., None], torch.nan)

    order = torch.tensor([[2, 0, 3, 1], [0, 2, 1, 3]])
    for run in (
        lambda: decode_any_order(model, order * 0, order, temperature=temperature),
        lambda: decode_jacobi(model, order, temperature=temperature),
    ):
        with pytest.raises(NotANumberError, match="no token for position 2 of row 1"):
            run()
