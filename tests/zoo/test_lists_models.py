"""The shipped text models: stock folders that load without this package, decode in any canvas."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.samplers.text import decode, load_text_model
from partsong_zoo import lists
from partsong_zoo.lists import draw
from partsong_zoo.lists.model import EOS, MASK, answer_text
from partsong_zoo.lists.scoring import accuracy, answers
from tests import covering

NAMES = ("lists-mdlm", "lists-ar")
#: Tasks with one answer that both models know by heart; those with several follow.
SURE = ("copy", "reverse", "sort", "insert_at", "remove_at", "replace_at")
RANDOM = ("insert_random", "remove_random", "replace_random")


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest) -> Any:
    return zoo.load(request.param)


@pytest.fixture(scope="module")
def diffusion() -> Any:
    return zoo.load("lists-mdlm").model


@pytest.mark.parametrize("name", NAMES)
def test_the_folders_are_stock_and_small(name: str) -> None:
    row = zoo.MODELS[name]
    assert (row.kind, row.task) == ("text", lists)
    assert sum(path.stat().st_size for path in row.folder.iterdir()) < 10_000_000
    model: Any = AutoModelForCausalLM.from_pretrained(row.folder)
    tokenizer = AutoTokenizer.from_pretrained(row.folder)
    assert type(model) is LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id) == (MASK, EOS) and model.config.eos_token_id == EOS
    assert model.config.partsong_adapter == ("mdlm" if name == "lists-mdlm" else "causal")
    assert getattr(model.config, "mask_token_id", None) == (MASK if name == "lists-mdlm" else None)


def test_loading_gives_model_and_tokenizer_in_the_type_asked_for() -> None:
    model, tokenizer = zoo.load("lists-ar", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert tokenizer.decode(tokenizer("sort : dog ant =").input_ids, skip_special_tokens=True) == "sort : dog ant ="


def test_lists_are_handled_one_token_at_a_time(loaded: Any) -> None:
    found = accuracy(loaded.model, 20 if covering.FULL else 10, seed=77, families=SURE + RANDOM, canvas=12)
    assert sum(found.values()) / len(found) >= 0.95, found


def test_every_canvas_will_do(diffusion: Any) -> None:
    for example in lists.examples(6, seed=5, families=["sort", "insert_at"]):
        shortest = len(example.answer.split()) + 1
        texts = {answers(diffusion, [example.prompt], canvas=canvas)[0] for canvas in (shortest, shortest + 3, 24)}
        assert texts == {example.answer}


@pytest.mark.full
def test_a_row_does_not_depend_on_the_batch_it_is_in(loaded: Any) -> None:
    prompts = [example.prompt for example in lists.examples(6, seed=8)]
    assert answers(loaded.model, prompts) == [answers(loaded.model, [prompt])[0] for prompt in prompts]


def test_shuffling_all_at_once_fails_as_theory_says_and_the_bound_avoids_it(diffusion: Any) -> None:
    """Independent draws of five places from five items are a shuffle with probability 5! / 5^5."""
    tokenizer, model = zoo.load("lists-mdlm").tokenizer, load_text_model(diffusion)
    prompts = [draw("shuffle", random.Random(seed), 5).prompt for seed in range(60)]
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    right = {}
    for rule in ("quota:per_step=6", "entropy-bound"):
        found = decode(model, ids, rule=rule, max_new_tokens=6, block_size=6, temperature=1.0, seed=3)
        texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found.tokens]
        right[rule] = sum(lists.check(prompt, text) for prompt, text in zip(prompts, texts, strict=True)) / len(texts)
    assert right["quota:per_step=6"] <= 120 / 3125 + 0.1
    assert right["entropy-bound"] >= 0.85


def test_stock_generation_of_the_causal_twin_is_the_plain_loop() -> None:
    model, tokenizer = zoo.load("lists-ar")
    for example in lists.examples(6, seed=4):
        ids = tokenizer(example.prompt, return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        assert answer_text(made) == answers(model, [example.prompt])[0]


def test_a_canvas_the_models_never_saw_is_refused(diffusion: Any) -> None:
    with pytest.raises(ArgumentError, match="canvas=25; use an integer from 1 to 24"):
        answers(diffusion, ["copy : ant bat cat ="], canvas=25)
