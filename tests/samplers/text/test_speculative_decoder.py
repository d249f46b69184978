"""`SpeculativeDecoder` against `generate`: batches of ragged prompts, processors, criteria, noise, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from partsong import SpeculativeDecoder
from partsong.errors import ArgumentError, UnsupportedError
from tests.reasoning.drafters import at_random, knowing, unruly
from tests.reasoning.local_models import LETTERS, llama, tokenizer
from tests.samplers.text import plain

VOCABULARY = len(LETTERS) + 2
PAD, EOS = 0, 1
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9], [12, 13, 14, 12]]
FOLDER = Path(__file__).parents[3] / "recipes" / "custom_generate"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama(5, max_position_embeddings=2048)


def batch(prompts: list[list[int]] = PROMPTS) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def stops() -> StoppingCriteriaList:
    return StoppingCriteriaList([StopStringCriteria(tokenizer(), ["e", "ta"])])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2, "min_new_tokens": 9},
    "words": {"bad_words_ids": [[8], [10, 11]], "sequence_bias": [[[12], 3.0]], "suppress_tokens": [4]},
    "forced": {"forced_eos_token_id": EOS, "exponential_decay_length_penalty": (4, 1.3)},
    "ends": {"eos_token_id": [EOS, 4, 7, 12, 20]},
    "strings": {"stopping_criteria": stops},
    "all": {"repetition_penalty": 1.3, "eos_token_id": [EOS, 4], "stopping_criteria": stops, "min_new_tokens": 4},
}
DRAFTERS: dict[str, Any] = {
    "none": lambda rows: None,
    "ngram": lambda rows: "ngram",
    "jacobi": lambda rows: "jacobi:window=5",
    "random": lambda rows: at_random(VOCABULARY),
    "right": knowing,
}


def asked(name: str) -> dict[str, Any]:
    return {key: value() if callable(value) else value for key, value in OPTIONS[name].items()}


def texts_of(sequences: Tensor) -> list[list[int]]:
    """Each row from its prompt on, without what fills it up."""
    longest = max(map(len, PROMPTS))
    rows = [row[longest - len(prompt) :] for row, prompt in zip(sequences.tolist(), PROMPTS, strict=True)]
    return [row[: len(row) - next(place for place, token in enumerate(reversed(row)) if token != PAD)] for row in rows]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_greedy_texts_are_those_of_generate(model: Any, options: str, drafter: str) -> None:
    usual: Any = model.generate(**batch(), max_new_tokens=20, do_sample=False, **asked(options))
    decoder = SpeculativeDecoder(speculate=DRAFTERS[drafter](texts_of(usual)))
    fast: Any = model.generate(**batch(), max_new_tokens=20, do_sample=False, custom_generate=decoder, **asked(options))
    assert torch.equal(fast, usual)
    assert decoder.last is not None
    if drafter == "none":
        assert decoder.last.drafted == 0
    if drafter == "right":
        # The guess at a text's last token is not needed: that token is drawn after the guess before it.
        assert decoder.last.rejected <= len(PROMPTS) < decoder.last.drafted
        # One forward reads the prompts; each further one verifies six guesses and draws one more.
        new = max(len(text) - len(prompt) for text, prompt in zip(texts_of(usual), PROMPTS, strict=True))
        assert decoder.last.num_forwards == 1 + -(-(new - 1) // 7)


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "plain"])
def test_the_options_matter(model: Any, options: str) -> None:
    usual, changed = (
        model.generate(**batch(), max_new_tokens=20, do_sample=False, **asked(n)) for n in ("plain", options)
    )
    assert not torch.equal(usual, changed)


@pytest.mark.parametrize("kind", ["deep", "chances", "no tokens"])
def test_a_drafter_that_heeds_nothing_changes_nothing(model: Any, kind: str) -> None:
    longer: Any = model.generate(**batch(), max_new_tokens=20, do_sample=False, eos_token_id=None)
    usual: Any = model.generate(**batch(), max_new_tokens=7, do_sample=False, eos_token_id=None)
    decoder = SpeculativeDecoder(speculate=unruly(texts_of(longer), kind))
    fast: Any = model.generate(**batch(), max_new_tokens=7, do_sample=False, eos_token_id=None, custom_generate=decoder)
    assert torch.equal(fast, usual)
    assert decoder.last is not None and decoder.last.drafted > decoder.last.rejected


def test_usual_drafters_guess(model: Any) -> None:
    for drafter in ("ngram", "jacobi"):
        decoder = SpeculativeDecoder(speculate=drafter)
        model.generate(**batch(), max_new_tokens=20, do_sample=False, eos_token_id=None, custom_generate=decoder)
        assert decoder.last is not None and decoder.last.drafted > decoder.last.rejected


SAMPLED: dict[str, dict[str, Any]] = {
    "warm": {"top_k": 0},
    "nucleus": {"temperature": 0.7, "top_p": 0.9, "top_k": 0},
    "top": {"top_k": 5, "repetition_penalty": 1.3, "min_p": 0.02, "eos_token_id": [EOS, 4]},
}


@pytest.mark.parametrize("drafter", ["ngram", "jacobi", "random", "right"])
@pytest.mark.parametrize("options", SAMPLED)
def test_sampled_texts_do_not_depend_on_guesses(model: Any, options: str, drafter: str) -> None:
    def sample(speculate: Any) -> tuple[Tensor, SpeculativeDecoder]:
        decoder = SpeculativeDecoder(speculate=speculate, seed=11)
        how = {"max_new_tokens": 20, "do_sample": True, **SAMPLED[options]}
        return model.generate(**batch(), custom_generate=decoder, **how), decoder

    usual, _ = sample(None)
    fast, decoder = sample(DRAFTERS[drafter](texts_of(usual)))
    assert torch.equal(fast, usual)
    assert decoder.last is not None and decoder.last.drafted > 0


def test_samples_have_the_distribution_of_generate(model: Any) -> None:
    """The first two tokens of many samples against the model's own probabilities, after top-k and temperature."""
    num, prompt = 4000, PROMPTS[0]
    ids = torch.tensor([prompt]).expand(num, -1)
    how = {"do_sample": True, "top_k": 3, "temperature": 1.5, "max_new_tokens": 2, "eos_token_id": None}
    drafter = SpeculativeDecoder(speculate=at_random(VOCABULARY, 4), seed=3)
    drawn: Any = model.generate(ids, custom_generate=drafter, **how)
    pairs = drawn[:, len(prompt) :]

    def chances(tokens: list[int]) -> Tensor:
        logits = model(torch.tensor([tokens])).logits[0, -1] / 1.5
        return logits.where(logits >= logits.topk(3).values[-1], -torch.inf).softmax(-1)

    with torch.no_grad():
        truth = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
        first = chances(prompt)
        for token in first.nonzero().flatten().tolist():
            truth[token] = first[token] * chances([*prompt, token])
    seen = torch.bincount(pairs[:, 0] * VOCABULARY + pairs[:, 1], minlength=VOCABULARY**2) / num
    assert float((seen - truth.flatten()).abs().sum()) / 2 < 0.03


def test_rows_of_a_prompt_are_different_samples(model: Any) -> None:
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": 8, "num_return_sequences": 3}
    rows: Any = model.generate(torch.tensor([[5, 6]]), custom_generate=SpeculativeDecoder(), **how)
    again: Any = model.generate(torch.tensor([[5, 6]]), custom_generate=SpeculativeDecoder(), **how)
    other: Any = model.generate(torch.tensor([[5, 6]]), custom_generate=SpeculativeDecoder(seed=1), **how)
    assert len({tuple(row) for row in rows.tolist()}) == 3
    assert torch.equal(rows, again) and not torch.equal(rows, other)


def test_a_dictionary_and_no_mask(model: Any) -> None:
    ids = torch.tensor([[5, 6, 7]])
    usual: Any = model.generate(ids, max_new_tokens=5, do_sample=False)
    how = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    assert torch.equal(model.generate(ids, custom_generate=SpeculativeDecoder(), **how).sequences, usual)


class Leaning(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + (input_ids[:, -1:] == 7) * torch.arange(scores.shape[1])


class Ending(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 5 == 0


def test_own_processors_and_criteria(model: Any) -> None:
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    how |= {"logits_processor": LogitsProcessorList([Leaning()]), "stopping_criteria": [Ending()]}
    usual: Any = model.generate(**batch(), **how)
    with pytest.raises(UnsupportedError, match=r"logits processor Leaning, .*row_wise"):
        model.generate(**batch(), custom_generate=SpeculativeDecoder(), **how)
    with pytest.raises(UnsupportedError, match=r"stopping criterion Ending, .*row_wise"):
        model.generate(**batch(), custom_generate=SpeculativeDecoder(row_wise=(Leaning,)), **how)
    decoder = SpeculativeDecoder(speculate=at_random(VOCABULARY), row_wise=(Leaning, Ending))
    assert torch.equal(model.generate(**batch(), custom_generate=decoder, **how), usual)


@pytest.mark.parametrize(
    ("decoder", "options", "kind", "words"),
    [
        ({}, {"num_beams": 2}, UnsupportedError, "beam_search"),
        ({}, {"prompt_lookup_num_tokens": 3}, UnsupportedError, "assisted_generation"),
        ({}, {"guidance_scale": 2.0}, UnsupportedError, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({}, {"prefix_allowed_tokens_fn": lambda row, ids: [5]}, UnsupportedError, "PrefixConstrainedLogitsProcessor"),
        ({}, {"output_scores": True, "return_dict_in_generate": True}, UnsupportedError, "output_scores"),
        ({"speculate": "nrgam"}, {}, ArgumentError, "The drafters are ngram, jacobi"),
        ({"seed": -1}, {}, ArgumentError, "seed"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    model: Any, decoder: Any, options: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        model.generate(**batch(), max_new_tokens=3, custom_generate=SpeculativeDecoder(**decoder), **options)


def test_padding_on_the_right_and_masked_models_are_refused(model: Any) -> None:
    ids, mask = torch.tensor([[5, 6, 0]]), torch.tensor([[1, 1, 0]])
    with pytest.raises(ArgumentError, match="padded on the left"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3, custom_generate=SpeculativeDecoder())
    other: Any = plain.llama()
    other.config.is_causal = True
    with pytest.raises(ArgumentError, match=r"call \.eval\(\)"):
        other.train().generate(torch.tensor([[5, 6]]), max_new_tokens=3, custom_generate=SpeculativeDecoder())


def test_a_folder_for_the_hub(model: Any) -> None:
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "stop_strings": ["e", "ta"]}
    usual: Any = model.generate(**batch(), tokenizer=tokenizer(), **how)
    how |= {"custom_generate": str(FOLDER), "trust_remote_code": True, "speculate": "jacobi"}
    assert torch.equal(model.generate(**batch(), tokenizer=tokenizer(), **how), usual)
    with pytest.raises(ValueError, match="stop_strings needs tokenizer="):
        model.generate(**batch(), **how)
