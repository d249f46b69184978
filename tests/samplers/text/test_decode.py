"""The decoding loop against decoding written out plainly, transformers' own generate, and itself in other batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from partsong.samplers.text.decode import decode
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.runner import StockTextModel
from tests.samplers.text import plain

FULL = TextAdapter(name="full", attention="full")
SHIFTED = TextAdapter(name="shifted", attention="full", shifted=True)
BLOCKS = TextAdapter(name="blocks", attention="block_causal", block_size=8)
SHIFTED_BLOCKS = TextAdapter(name="shifted blocks", attention="block_causal", block_size=8, shifted=True)
AFTER_PROMPT = TextAdapter(name="after prompt", attention="block_causal", block_size=4, block_origin="prompt")

RULES = {
    "quota:per_step=2": plain.quota(2),
    "threshold:threshold=0.3": plain.threshold(0.3),
    "entropy-bound:gamma=2": plain.entropy_bound(2.0),
    "factor:factor=2": plain.factor(2.0),
}
#: Every rule with knobs at which it takes several tokens at once of so unsure a model.
EVERY_RULE = [
    *RULES,
    "llada:per_step=2",
    "entropy:threshold=1.5",
    "hierarchy:threshold=0.4,low_threshold=0.2",
    "kl-stable:threshold=0.2,divergence=0.5,history=1",
    "token-editing:threshold=0.3,editing_threshold=0.25,max_post_steps=3",
]
CACHES = ["none", "prefix", "dual", "delayed", "vicinity:radius=3"]
#: Every rule with one cache, and every cache with one rule.
PAIRS = [(rule, "dual") for rule in EVERY_RULE] + [("entropy-bound:gamma=2", c) for c in CACHES if c != "dual"]
#: Each of these with one of four attentions, in turns; with --full each with all four.
CASES = [
    pytest.param(adapter, cache, rule, marks=() if (row + column) % 4 == 0 else pytest.mark.full)
    for row, (rule, cache) in enumerate(PAIRS)
    for column, adapter in enumerate((FULL, SHIFTED, BLOCKS, SHIFTED_BLOCKS))
]


def model_of(adapter: TextAdapter, seed: int = 0, **more: Any) -> StockTextModel:
    return StockTextModel(plain.llama(seed, **more), adapter, mask_token_id=plain.MASK)


def prompts(count: int, seed: int = 0, most: int = 9) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(plain.MASK) for _ in range(draw.randint(1, most))] for _ in range(count)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("adapter", [FULL, SHIFTED], ids=lambda a: a.name)
def test_full_attention_is_the_plain_loop(rule: str, adapter: TextAdapter) -> None:
    model = model_of(adapter)
    for prompt in prompts(3):
        expected, forwards = plain.fill(
            model.module, prompt, [None] * 12, RULES[rule], block=5, shifted=adapter.shifted
        )
        decoded = decode(model, [prompt], rule=rule, max_new_tokens=12, block_size=5)
        assert decoded.tokens == [expected]
        assert decoded.steps == forwards == decoded.tallies[0].num_forwards


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cache", ["none", "prefix"])
def test_block_diffusion_is_the_plain_loop(rule: str, cache: str) -> None:
    model = model_of(AFTER_PROMPT)
    for prompt in prompts(3):
        expected, forwards = plain.fill(
            model.module, prompt, [None] * 10, RULES[rule], block=4, sees=plain.sees_blocks(4, len(prompt))
        )
        decoded = decode(model, [prompt], rule=rule, cache=cache, max_new_tokens=10)
        assert decoded.tokens == [expected]
        assert decoded.tallies[0].num_forwards == forwards


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_prompt_of_one_token_is_read_beside_longer_answers(cache: str) -> None:
    """Its answer's first token is read from it, in a row that has fewer positions to read than another."""
    model, starts, answers = model_of(SHIFTED, seed=1), [[3], [5]], [[None, None, 7, *[None] * 3], [None] * 6]
    together = decode(model, starts, template=answers, rule="quota", cache=cache)
    for start, answer, tokens in zip(starts, answers, together.tokens, strict=True):
        assert decode(model, [start], template=[answer], rule="quota", cache=cache).tokens == [tokens]


def test_a_grid_from_the_start_of_the_text() -> None:
    """The first block holds the end of the prompt."""
    model = model_of(BLOCKS)
    prompt = prompts(1)[0][:5]
    tokens, pattern = list(prompt), plain.sees_blocks(8)
    while len(tokens) < 21:
        end = (len(tokens) // 8 + 1) * 8
        block = [*tokens, *[plain.MASK] * (min(end, 21) - len(tokens))]
        while plain.MASK in block:
            probs = plain.probabilities(model.module, block, pattern(len(block)), False)
            for p in plain.quota(2)(probs, [p for p, token in enumerate(block) if token == plain.MASK]):
                block[p] = int(probs[p].argmax())
        tokens = block
    assert decode(model, [prompt], rule="quota:per_step=2", max_new_tokens=16).tokens == [tokens[5:]]


def test_a_causal_model_is_transformers_generate() -> None:
    module = plain.llama()
    rows = prompts(4)
    for prompt, tokens in zip(rows, decode(module, rows, max_new_tokens=11).tokens, strict=True):
        expected = module.generate(torch.tensor([prompt]), max_new_tokens=11, do_sample=False, pad_token_id=0)
        assert tokens == expected[0, len(prompt) :].tolist()


def test_a_causal_model_makes_one_forward_per_token() -> None:
    tally = decode(plain.llama(), [[1, 2, 3]], max_new_tokens=6).tallies[0]
    assert tally.forwards == {"prefill": 1, "refresh": 0, "denoise": 5, "verify": 0, "store": 0}
    assert tally.tokens_per_forward == tally.tokens_per_forward_all == 1.0


@pytest.mark.parametrize(("adapter", "cache", "rule"), CASES, ids=str)
def test_a_text_does_not_depend_on_its_batch(adapter: TextAdapter, cache: str, rule: str) -> None:
    model, rows = model_of(adapter), prompts(5, seed=3)
    seeds = [11, 12, 13, 14, 15]
    options: dict[str, Any] = {"rule": rule, "cache": cache, "max_new_tokens": 14, "temperature": 0.7}
    together = decode(model, rows, seed=seeds, **options)
    for row, prompt in enumerate(rows):
        alone = decode(model, [prompt], seed=[seeds[row]], **options)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.tallies[0].forwards == together.tallies[row].forwards
        assert alone.tallies[0].edits == together.tallies[row].edits


@pytest.mark.parametrize(("adapter", "cache", "rule"), [case for case in CASES if case.values[1] != "none"], ids=str)
def test_a_cache_that_always_refreshes_is_none(adapter: TextAdapter, cache: str, rule: str) -> None:
    model, rows = model_of(adapter), prompts(4, seed=5)
    options: dict[str, Any] = {"rule": rule, "max_new_tokens": 13, "temperature": 0.5, "seed": 3}
    every = f"{cache}{',' if ':' in cache else ':'}refresh_every=1"
    assert decode(model, rows, cache=every, **options).tokens == decode(model, rows, cache="none", **options).tokens


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_keys_after_the_end_of_a_text_are_forgotten(cache: str) -> None:
    """In float64: a text that stops within its block, before all of the block is decided, sees nothing after that."""
    model = StockTextModel(plain.llama().double(), FULL, mask_token_id=plain.MASK, eos_token_ids=(7,))
    options: dict[str, Any] = {"max_new_tokens": 12, "block_size": 4, "temperature": 0.8, "seed": 3}
    rows = prompts(150, seed=9)
    expected = decode(model, rows, **options)
    assert "stop token" in expected.stopped
    assert decode(model, rows, cache=f"{cache}:refresh_every=1", **options).tokens == expected.tokens


@pytest.mark.parametrize("block_size", [8, 4])
@pytest.mark.parametrize("open_blocks", [1, 2, 3])
@pytest.mark.parametrize("adapter", [BLOCKS, SHIFTED_BLOCKS], ids=lambda a: a.name)
def test_keys_of_finished_blocks_are_exact(adapter: TextAdapter, open_blocks: int, block_size: int) -> None:
    model, rows = model_of(adapter), prompts(4, seed=7, most=19)
    options: dict[str, Any] = {"max_new_tokens": 30, "open_blocks": open_blocks, "block_size": block_size}
    options["rule"] = "entropy-bound:gamma=3"
    kept, anew = (decode(model, rows, cache=cache, **options) for cache in ("prefix", "none"))
    assert kept.tokens == anew.tokens
    assert sum(tally.flops for tally in kept.tallies) < 0.8 * sum(tally.flops for tally in anew.tallies)


def test_what_a_cache_computes() -> None:
    """Of 8 + 16 positions: all at a block's start, then the block and what follows, the block, or its surroundings."""
    model = model_of(FULL)
    queries: list[tuple[str, int]] = []
    forward = model.forward

    def noted(tokens: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        queries.append(("", tokens.shape[1]))
        return forward(tokens, *args, **named)

    model.forward = noted  # type: ignore[method-assign]
    expected = {
        "none": [24] * 4,
        "prefix": [24, 16, 24, 8],
        "dual": [24, 8, 24, 8],
        "vicinity:radius=3": [24, 14, 24, 11],
        "dual:refresh_blocks=false": [24, 8, 8, 8],
        "delayed:refresh_every=none": [24, 16, 12, 8],
        "delayed:refresh_every=2": [24, 16, 24, 8],
    }
    for cache, counts in expected.items():
        queries.clear()
        decode(model, [list(range(8))], rule="quota:per_step=4", cache=cache, max_new_tokens=16, block_size=8)
        assert [count for _, count in queries] == counts, cache


def test_several_blocks_at_once() -> None:
    """The next block joins when half of the one before is decided."""
    model = model_of(FULL)
    options: dict[str, Any] = {"rule": "quota:per_step=1,by=left", "max_new_tokens": 8, "block_size": 4}
    one = decode(model, [[1, 2]], open_blocks=1, **options)
    assert decode(model, [[1, 2]], open_blocks=2, **options).tokens == one.tokens
    both = decode(model, [[1, 2]], rule="quota:per_step=2,by=random", max_new_tokens=8, block_size=4, open_blocks=2)
    assert both.steps == 4


def test_texts_end_at_a_stop_token_and_nothing_floods() -> None:
    module = plain.llama()
    model = StockTextModel(module, FULL, mask_token_id=plain.MASK)
    ended = 0
    for prompt in prompts(8, seed=1):
        free, _ = plain.fill(module, prompt, [None] * 12, plain.quota(1), block=12)
        stop = free[len(free) // 2]
        expected, _ = plain.fill(module, prompt, [None] * 12, plain.quota(1), block=12, eos=stop)
        decoded = decode(model, [prompt], rule="quota", max_new_tokens=12, block_size=12, stop_token_ids=[stop])
        assert decoded.tokens == [expected]
        assert decoded.stopped == ["stop token" if expected[-1] == stop else "length"]
        ended += decoded.stopped == ["stop token"]
    assert ended >= 4


def test_given_tokens_stay_and_gaps_are_filled() -> None:
    model, module = model_of(FULL), plain.llama()
    answer = [None, 7, None, None, 3, None]
    expected, _ = plain.fill(module, [1, 2], answer, plain.threshold(0.3), block=6)
    decoded = decode(model, [[1, 2]], template=[answer], rule="threshold:threshold=0.3", block_size=6)
    assert decoded.tokens == [expected]
    assert (expected[1], expected[4]) == (7, 3)
    holes = [1, 2, *(plain.MASK if token is None else token for token in answer)]
    assert decode(model, [holes], rule="threshold:threshold=0.3", block_size=6).tokens == [expected]
    # A stop token does not cut off what was given after it.
    assert len(decode(model, [holes], stop_token_ids=list(range(plain.MASK)), block_size=6).tokens[0]) >= 5


def test_a_beginning_is_kept_by_a_causal_model() -> None:
    module = plain.llama()
    plainly = module.generate(torch.tensor([[4, 5, 8, 9]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    decoded = decode(module, [[4, 5]], template=[[8, 9]], max_new_tokens=5)
    assert decoded.tokens == [plainly[0, 2:].tolist()]


def test_padded_tensors_are_the_lists() -> None:
    model, rows = model_of(FULL), [[1, 2, 3], [4]]
    expected = decode(model, rows, max_new_tokens=6).tokens
    ids = torch.tensor([[1, 2, 3], [0, 0, 4]])
    assert decode(model, ids, attention_mask=torch.tensor([[1, 1, 1], [0, 0, 1]]), max_new_tokens=6).tokens == expected


def test_the_certificate_is_the_sum_it_says() -> None:
    module, prompt = plain.llama(), [3, 4, 5]
    model = StockTextModel(module, FULL, mask_token_id=plain.MASK)
    tokens, spent = [*prompt, *[plain.MASK] * 9], 0.0
    while plain.MASK in tokens:
        probs = plain.probabilities(module, tokens, plain.sees_all(len(tokens)), False)
        taken = plain.entropy_bound(2.0)(probs, [p for p, token in enumerate(tokens) if token == plain.MASK])
        entropies = [float(-(probs[p][:-1] * probs[p][:-1].log()).sum()) for p in taken]
        spent += sum(entropies) - max(entropies)
        for p in taken:
            tokens[p] = int(probs[p].argmax())
    decoded = decode(model, [prompt], rule="entropy-bound:gamma=2", max_new_tokens=9, block_size=9)
    assert decoded.tallies[0].certificate == pytest.approx(spent, rel=1e-4)
    assert decoded.summary()["certificate"] == decoded.tallies[0].certificate
    assert decode(model, [prompt], rule="token-editing", max_new_tokens=4).tallies[0].certificate is None
    assert decode(model, [prompt], rule="quota", max_new_tokens=4).tallies[0].certificate == 0.0
