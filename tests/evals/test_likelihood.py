"""Likelihoods against enumeration, against transformers' own logits, and against each other."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.likelihood import log_likelihood
from partsong.evals.oracle.model import OracleModel, Support
from partsong.evals.oracle.tasks import oracle_tasks
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.runner import StockTextModel

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 23,
    "max_position_embeddings": 64,
}
MASK = 22


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0 if weight.dim() == 2 else 1.0)
    return model


def masked_model(llama: LlamaForCausalLM, **row: Any) -> StockTextModel:
    fields: dict[str, Any] = {"name": "tiny", "attention": "full"} | row
    return StockTextModel(llama, TextAdapter(**fields), mask_token_id=MASK)


def full_logprobs(llama: LlamaForCausalLM, ids: list[int], seen: Tensor | None = None) -> Tensor:
    """The plain way: a forward of the module with a 4-D mask, a softmax over all tokens but the mask."""
    seen = torch.ones(len(ids), len(ids), dtype=torch.bool) if seen is None else seen
    with torch.no_grad():
        logits = llama(torch.tensor([ids]), attention_mask=seen[None, None]).logits[0]
    logits[:, MASK] = -math.inf
    return logits.log_softmax(-1)


def plain_bound(llama: LlamaForCausalLM, prompt: list[int], answer: list[int], shift: int = 0) -> float:
    """The mean over all orders of the chain of log-probabilities, order by order."""
    found = []
    for order in itertools.permutations(range(len(answer))):
        total = 0.0
        for step, place in enumerate(order):
            ids = [*prompt, *(MASK if other in order[step:] else token for other, token in enumerate(answer))]
            total += float(full_logprobs(llama, ids)[len(prompt) + place - shift, answer[place]])
        found.append(total)
    return statistics.fmean(found)


# --- a model whose answer is known ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["copy", "replace", "shuffle", "pairs"])
def test_any_order_gives_the_exact_likelihood_of_the_oracle(name: str) -> None:
    support = oracle_tasks()[name]
    texts = support.texts[:: max(len(support.texts) // 3, 1)][:3].tolist()
    n, generator = support.length, torch.Generator().manual_seed(1)
    model, places = OracleModel(support), torch.arange(n)[None]
    for text in texts:
        order, total = torch.randperm(n, generator=generator).tolist(), 0.0
        for step, place in enumerate(order):
            ids = torch.tensor(
                [[model.mask_token_id if at in order[step:] else token for at, token in enumerate(text)]]
            )
            hidden = model.forward(ids, places, places, torch.ones(1, n, n, dtype=torch.bool), None)
            total += float(hidden[0, place, text[place]])
        assert total == pytest.approx(-math.log(len(support.texts)), abs=1e-9)


def test_all_masks_give_the_exact_likelihood_of_the_oracle() -> None:
    support = Support("small", torch.tensor(list(itertools.permutations(range(4)))))
    found = log_likelihood(OracleModel(support), [[]], [[2, 0, 3, 1]], num_pairs=7)[0]
    assert found.log_likelihood == pytest.approx(-math.log(24), abs=1e-9)
    # 2 ** 4 - 1 masks are not empty, and all of them were tried.
    assert (found.standard_error, found.forwards, found.kind) == (0.0, 15, "bound")


def test_estimates_on_the_oracle_are_unbiased_and_know_their_error() -> None:
    support = oracle_tasks()["replace"]
    text = support.texts[3].tolist()
    runs = 60
    found = log_likelihood(OracleModel(support), [[]] * runs, [text] * runs, num_pairs=8)
    values = [one.log_likelihood for one in found]
    spread = statistics.stdev(values)
    assert abs(statistics.fmean(values) + math.log(8)) < 3.5 * spread / math.sqrt(runs)
    stated = math.sqrt(statistics.fmean(one.standard_error**2 for one in found))
    assert 0.7 * spread < stated < 2.0 * spread
    assert {one.forwards for one in found} == {17}


def test_an_impossible_answer_is_nearly_impossible() -> None:
    found = log_likelihood(OracleModel(oracle_tasks()["copy"]), [[]], [[0, 1, 2, 3, 4, 5, 7, 6]])[0]
    assert found.log_likelihood < -100.0


# --- models of transformers -------------------------------------------------------------------------------------------


def test_masks_enumerated_equal_the_mean_over_all_orders(llama: LlamaForCausalLM) -> None:
    prompt, answer = [3, 1, 4], [15, 9, 2, 6]
    found = log_likelihood(masked_model(llama), [prompt], [answer])[0]
    assert found.log_likelihood == pytest.approx(plain_bound(llama, prompt, answer), abs=1e-9)
    shifted = log_likelihood(masked_model(llama, shifted=True), [prompt], [answer])[0]
    assert shifted.log_likelihood == pytest.approx(plain_bound(llama, prompt, answer, shift=1), abs=1e-9)


def test_pairs_agree_with_independent_masks_and_are_less_noisy(llama: LlamaForCausalLM) -> None:
    prompt, answer, runs = [3, 1, 4], [15, 9, 2, 6, 5, 11], 80
    model = masked_model(llama)
    truth = log_likelihood(model, [prompt], [answer], num_pairs=31)[0]
    assert truth.standard_error == 0.0
    spreads = {}
    for masks in ("pairs", "independent"):
        found = log_likelihood(model, [prompt] * runs, [answer] * runs, num_pairs=4, masks=masks, batch_size=64)
        values = [one.log_likelihood for one in found]
        spreads[masks] = statistics.stdev(values)
        assert abs(statistics.fmean(values) - truth.log_likelihood) < 3.5 * spreads[masks] / math.sqrt(runs)
    assert spreads["pairs"] < 0.7 * spreads["independent"]


def test_blocks_are_taken_one_after_another(llama: LlamaForCausalLM) -> None:
    prompt, answer = [3, 1, 4, 1, 5], [9, 2, 6, 5, 11]
    model = masked_model(llama, attention="block_causal", block_size=4)
    # Blocks of 4 from the first token: the answer has 3 tokens of the second and 2 of the third.
    whole, blocks = [*prompt, *answer], torch.arange(10) // 4
    by_hand = 0.0
    for start, end in ((5, 8), (8, 10)):
        chains = []
        for order in itertools.permutations(range(start, end)):
            total = 0.0
            for step, place in enumerate(order):
                ids = [MASK if other in order[step:] else token for other, token in enumerate(whole[:end])]
                seen = blocks[None, :end] <= blocks[:end, None]
                total += float(full_logprobs(llama, ids, seen)[place, whole[place]])
            chains.append(total)
        by_hand += statistics.fmean(chains)
    found = log_likelihood(model, [prompt], [answer])[0]
    assert found.log_likelihood == pytest.approx(by_hand, abs=1e-9)
    assert found.standard_error == 0.0
    from_prompt = masked_model(llama, attention="block_causal", block_size=5, block_origin="prompt")
    assert log_likelihood(from_prompt, [prompt], [answer])[0].forwards == 2**5 - 1


def test_causal_models_are_exact(llama: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    qwen = Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=False)).eval().double()
    prompts, answers = [[3, 1, 4, 1, 5], [9], [2, 6, 5]], [[3, 5], [8, 9, 7, 9, 3], [2]]
    for module in (llama, qwen):
        found = log_likelihood(module, prompts, answers, batch_size=2)
        for prompt, answer, one in zip(prompts, answers, found, strict=True):
            with torch.no_grad():
                logits = module(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            by_transformers = float(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum())
            assert one.log_likelihood == pytest.approx(by_transformers, abs=1e-9)
            assert (one.kind, one.standard_error, one.forwards) == ("exact", 0.0, 1)
            assert one.greedy == (logits.argmax(-1).tolist() == answer)
        written = module.generate(torch.tensor([prompts[0]]), do_sample=False, max_new_tokens=4)[0, 5:].tolist()
        assert log_likelihood(module, [prompts[0]], [written])[0].greedy is True


def test_a_row_is_the_same_alone_and_in_a_batch(llama: LlamaForCausalLM) -> None:
    model = masked_model(llama)
    prompts, answers = [[3, 1, 4, 1, 5], [9], []], [[3, 5, 8, 9, 7, 9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3, 2]]
    rows = [11, 12, 13]
    together = log_likelihood(model, prompts, answers, num_pairs=3, seed=rows, batch_size=5)
    for index, seed in enumerate(rows):
        alone = log_likelihood(model, [prompts[index]], [answers[index]], num_pairs=3, seed=[seed], batch_size=1)[0]
        assert alone.log_likelihood == pytest.approx(together[index].log_likelihood, abs=1e-10)
        assert alone.standard_error == pytest.approx(together[index].standard_error, abs=1e-10)
    other = log_likelihood(model, prompts, answers, num_pairs=3, seed=14)
    assert other[0].log_likelihood != together[0].log_likelihood


def test_one_pair_says_nothing_of_its_error(llama: LlamaForCausalLM) -> None:
    found = log_likelihood(masked_model(llama), [[1]], [[2, 3, 4, 5]], num_pairs=1)[0]
    assert math.isnan(found.standard_error) and found.forwards == 3


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "answers", "options", "named"),
    [
        ([[1]], [[]], {}, "answer 0 is empty"),
        ([[1]], [[2, MASK]], {}, "the mask token 22"),
        ([[1], [2]], [[3]], {}, "2 prompts and 1 answers"),
        ([[1]], [[99]], {}, "token 99"),
        ([[1]], [[2]], {"num_pairs": 0}, "num_pairs=0"),
        ([[1]], [[2]], {"batch_size": True}, "batch_size=True"),
        ([[1]], [[2]], {"masks": "some"}, "masks='some'"),
        ([[1]], [[2]], {"seed": [1, 2]}, "2 seeds for 1 answers"),
    ],
)
def test_refusals(
    llama: LlamaForCausalLM, prompts: list[list[int]], answers: list[list[int]], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        log_likelihood(masked_model(llama), prompts, answers, **options)


def test_models_that_cannot_be_asked_are_refused(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ArgumentError, match="prompt 0 is empty"):
        log_likelihood(masked_model(llama, shifted=True), [[]], [[1]])
    uniform = masked_model(llama)
    uniform.adapter = TextAdapter(name="renoising", attention="full", noise="uniform")
    with pytest.raises(UnsupportedError, match="renoising"):
        log_likelihood(uniform, [[1]], [[2]])
