"""Soft tokens: without mixtures the rule is token editing; with them it is the plain loop over mixed embeddings."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, GemmaConfig, GemmaForCausalLM, PreTrainedModel

from partsong.errors import UnsupportedError
from partsong.evals.oracle.model import OracleModel
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.samplers.text.decode import decode, decode_steps
from partsong.samplers.text.families import ADAPTERS
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.registry import parse_rule
from partsong.samplers.text.rules_revising import SoftTokens, TokenEditing
from partsong.samplers.text.runner import StockTextModel
from tests.covering import chosen
from tests.samplers.text import plain
from tests.samplers.text.test_decode import AFTER_PROMPT, BLOCKS, FULL, SHIFTED, SHIFTED_BLOCKS, prompts
from tests.samplers.text.test_rules import places, view_of

SOFT = SoftTokens(threshold=0.3, sure=0.8, max_post_steps=5)


def model_of(adapter: TextAdapter, **more: Any) -> StockTextModel:
    return StockTextModel(plain.llama(**more).double(), adapter, mask_token_id=plain.MASK)


THREES = itertools.product((FULL, SHIFTED, BLOCKS), ("none", "dual"), (0.0, 0.7))


@pytest.mark.parametrize(("adapter", "cache", "temperature"), chosen(THREES), ids=lambda a: getattr(a, "name", a))
def test_without_mixtures_it_is_token_editing(adapter: TextAdapter, cache: str, temperature: float) -> None:
    knobs: dict[str, Any] = {"threshold": 0.3, "editing_threshold": 0.25, "max_post_steps": 3}
    options: dict[str, Any] = {"max_new_tokens": 14, "cache": cache, "temperature": temperature, "seed": 4}
    model, rows = model_of(adapter), prompts(6, seed=2)
    editing = decode(model, rows, rule=TokenEditing(**knobs), **options)
    soft = decode(model, rows, rule=SoftTokens(**knobs, weight=0.0, sure=1.0), **options)
    assert soft.tokens == editing.tokens
    for mine, other in zip(soft.tallies, editing.tallies, strict=True):
        assert (mine.forwards, mine.edits, mine.certificate) == (other.forwards, other.edits, None)
    mixed = decode(model, rows, rule=SoftTokens(**knobs, weight=1.0, sure=1.0), **options)
    assert mixed.tokens != editing.tokens, "a model as unsure as this one reads something else"


def mixed_probabilities(module: PreTrainedModel, tokens: list[int], share: list[float]) -> Tensor:
    """What the model says of each place of one text, which it reads as mixtures with the mask."""
    table = module.get_input_embeddings().get_parameter("weight")
    pairs = zip(tokens, share, strict=True)
    embedded = torch.stack([(1 - part) * table[token] + part * table[plain.MASK] for token, part in pairs])
    with torch.no_grad():
        sees = plain.sees_all(len(tokens))[None, None]
        logits = module(inputs_embeds=embedded[None], attention_mask=sees).logits[0]
    logits[:, plain.MASK] = -torch.inf
    return logits.softmax(-1)


def by_hand(module: PreTrainedModel, prompt: list[int], num: int, block: int, rule: SoftTokens) -> tuple[Any, int]:
    """Decodes one text with mixed embeddings, one block after the other: its tokens and the forwards."""
    tokens, share = [*prompt, *[plain.MASK] * num], [0.0] * (len(prompt) + num)
    forwards = 0
    for start in range(len(prompt), len(tokens), block):
        mine, spent = range(start, min(start + block, len(tokens))), 0
        while True:
            best, guess = (each.tolist() for each in mixed_probabilities(module, tokens, share).max(-1))
            forwards += 1
            open_ = [p for p in mine if tokens[p] == plain.MASK]
            taken = [p for p in open_ if best[p] > rule.threshold] or sorted(open_, key=lambda p: -best[p])[:1]
            edited = [p for p in mine if p not in open_ and guess[p] != tokens[p] and best[p] > rule.editing_threshold]
            if not open_ and spent >= rule.max_post_steps:
                edited = []
            for p in (*taken, *edited):
                tokens[p] = guess[p]
            left = [p for p in mine if tokens[p] == plain.MASK]
            doubt = {p: 1 - (best[p] if tokens[p] == guess[p] else 1 - best[p]) for p in mine}
            if not left and (not taken + edited or all(1 - doubt[p] > rule.sure for p in mine)):
                break
            spent += not open_
            for p in mine:
                share[p] = 0.0 if p in left else rule.weight * doubt[p]
        for p in mine:
            share[p] = 0.0
    return tokens[len(prompt) :], forwards


@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_it_is_the_plain_loop_over_mixed_embeddings(weight: float) -> None:
    rule = SoftTokens(threshold=0.3, sure=0.8, weight=weight, max_post_steps=4)
    model, edits = model_of(FULL), 0
    for prompt in prompts(8, seed=6):
        expected, forwards = by_hand(model.module, prompt, 11, 4, rule)
        decoded = decode(model, [prompt], rule=rule, max_new_tokens=11, block_size=4)
        assert decoded.tokens == [expected]
        assert decoded.tallies[0].num_forwards == forwards
        edits += decoded.tallies[0].edits
    assert edits > 3


@pytest.mark.parametrize(
    "adapter",
    [*(pytest.param(each, marks=pytest.mark.full) for each in (SHIFTED, BLOCKS)), FULL, SHIFTED_BLOCKS],
    ids=lambda a: a.name,
)
def test_a_text_does_not_depend_on_its_batch(adapter: TextAdapter) -> None:
    model, rows = model_of(adapter), prompts(5, seed=3)
    options: dict[str, Any] = {"rule": SOFT, "max_new_tokens": 14, "temperature": 0.7}
    together = decode(model, rows, seed=[1, 2, 3, 4, 5], **options)
    for row, prompt in enumerate(rows):
        alone = decode(model, [prompt], seed=[row + 1], **options)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.tallies[0].forwards == together.tallies[row].forwards


@pytest.mark.parametrize("open_blocks", [1, 2])
@pytest.mark.parametrize("adapter", [BLOCKS, AFTER_PROMPT], ids=lambda a: a.name)
def test_keys_of_finished_blocks_are_those_of_plain_tokens(adapter: TextAdapter, open_blocks: int) -> None:
    """A block that ends is read once more as it is, so that later blocks see tokens and no mixtures."""
    model, rows = model_of(adapter), prompts(4, seed=7)
    options: dict[str, Any] = {"rule": SOFT, "max_new_tokens": 22, "open_blocks": open_blocks}
    kept, anew = (decode(model, rows, cache=cache, **options) for cache in ("prefix", "none"))
    assert kept.tokens == anew.tokens
    assert [tally.num_forwards for tally in kept.tallies] == [tally.num_forwards for tally in anew.tallies]


def test_streams_tell_what_was_overwritten() -> None:
    model, rows = model_of(FULL), prompts(3, seed=8)
    texts: dict[int, dict[int, int | None]] = {row: {} for row in range(3)}
    steps = decode_steps(model, rows, rule=SOFT, max_new_tokens=10)
    kinds = set()
    for step in steps:
        for event in step.events:
            texts[event.row][event.position] = event.token
            kinds.add(event.kind)
    whole = decode(model, rows, rule=SOFT, max_new_tokens=10).tokens
    assert kinds == {"commit", "revise"}
    assert [[texts[r][p] for p in sorted(texts[r])] for r in range(3)] == whole


def forward(model: StockTextModel, tokens: Tensor, share: Tensor | None) -> Tensor:
    order = torch.arange(tokens.shape[1]).expand_as(tokens)
    visible = torch.ones(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    if share is None:
        return model.forward(tokens, order, order, visible, None)
    return model.forward_mixed(tokens, share, order, order, visible, None)


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": plain.VOCAB,
}


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES)).eval()


def gemma() -> GemmaForCausalLM:
    """Its embeddings are multiplied by a number before the first layer."""
    torch.manual_seed(0)
    return GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8, initializer_range=0.3)).eval()


@pytest.mark.parametrize(
    ("module", "adapter"),
    [(plain.llama, FULL), (gemma, FULL), (bert, ADAPTERS["bert"])],
    ids=["llama", "gemma", "bert"],
)
def test_a_mixture_lies_between_a_token_and_the_mask(module: Any, adapter: TextAdapter) -> None:
    model = StockTextModel(module().double(), adapter, mask_token_id=plain.MASK)
    tokens = torch.tensor([[3, 4, 5, 6]])
    share = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(forward(model, tokens, 0 * share), forward(model, tokens, None), rtol=0, atol=0)
    masked = forward(model, torch.tensor([[3, plain.MASK, 5, 6]]), None)
    torch.testing.assert_close(forward(model, tokens, share), masked, rtol=1e-10, atol=1e-12)
    between = forward(model, tokens, 0.5 * share)
    assert float((between - masked).abs().max()) > 1e-3 < float((between - forward(model, tokens, None)).abs().max())


def test_one_step_by_hand() -> None:
    view = view_of(
        [0.95, 0.6, 0.2, 0.7],
        undecided=[True, True, True, False],
        argmax=torch.tensor([[7, 7, 7, 8]]),
        token_prob=torch.tensor([[0.95, 0.6, 0.2, 0.1]], dtype=torch.float64),
    )
    choice = SoftTokens(threshold=0.5, weight=0.5).choose(view)
    assert (places(choice.write), places(choice.undecided)) == ([0, 1, 3], [2])
    assert choice.token[0, [0, 1, 3]].tolist() == [7, 7, 8]
    assert choice.mask_share is not None
    assert choice.mask_share[0].tolist() == pytest.approx([0.025, 0.2, 0.0, 0.15])
    sure = view_of([0.95, 0.99], undecided=[True, False], argmax=torch.tensor([[7, 5]]))
    ended = SoftTokens().choose(sure)
    assert places(ended.pending) == [] and ended.mask_share is not None and not ended.mask_share.any()
    doubtful = SoftTokens(sure=0.97).choose(sure)
    assert places(doubtful.pending) == [0, 1]


def test_refusals() -> None:
    task = oracle_tasks()["copy"]
    with pytest.raises(UnsupportedError, match="OracleModel has no forward_mixed; use token-editing"):
        decode(OracleModel(task), [[]], rule="soft-tokens", max_new_tokens=task.length)
    with pytest.raises(UnsupportedError, match="SoftTokens does not fit noise of the kind 'none'"):
        decode(plain.llama(), [[1, 2]], rule="soft-tokens", max_new_tokens=4)
    causal = StockTextModel(plain.llama(), TextAdapter(name="causal", attention="causal", noise="none"))
    with pytest.raises(UnsupportedError, match="no mask token to mix with"):
        forward(causal, torch.tensor([[1, 2]]), torch.zeros(1, 2))
    with pytest.raises(UnsupportedError, match="SoftTokens revises tokens, which the rows"):
        decode(model_of(FULL), [[1, 2]], rule="soft-tokens", max_new_tokens=4, verify=2)
    assert parse_rule("soft-tokens:threshold=0.3,weight=0.5") == SoftTokens(threshold=0.3, weight=0.5)
