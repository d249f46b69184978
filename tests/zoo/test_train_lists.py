"""The lists recipe runs from nothing to two stock folders and resumes bit by bit; its losses are what they claim."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong_zoo import lists
from partsong_zoo.lists.model import (
    BOS,
    CANVAS,
    EOS,
    MASK,
    PAD,
    PROMPT,
    answer_text,
    build_model,
    build_tokenizer,
    full_mask,
    token_ids,
)
from partsong_zoo.lists.training import ListsBatch, causal_loss, diffusion_loss, draw_batch, draw_masks
from partsong_zoo.shapes.scenes import generator
from partsong_zoo.training.common import World
from tests.recipe_module import loaded

NAMES = ("lists-mdlm", "lists-ar")


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_lists") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **changed: Any) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {"mdlm_steps": 30, "ar_steps": 30, "batch": 16, "heads": 1, "depth": 1}
    measured = {"prompts": 2, "draws": 4, "save_minutes": 0.0}
    return recipe.Config(out=str(out), **{**sizes, **measured, **changed})


@pytest.fixture(scope="module")
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    recipe.run(tiny(recipe, out), World("cpu"))
    return out


def random_model(kind: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = build_model(kind, heads=1, depth=2)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_makes_stock_folders_and_scores(finished: Path, name: str) -> None:
    folder = finished / "export" / name
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    report = json.loads((finished / f"scores-{name}.json").read_text())
    for how in ("greedy", "sampled"):
        assert list(report[how]) == list(lists.FAMILIES)
        assert all(0.0 <= share <= 1.0 for share in report[how].values())
    assert len(report["total_variation"]) == 9


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_training_lowers_the_loss_on_data_it_has_not_seen(recipe: ModuleType, finished: Path, kind: Any) -> None:
    model = recipe.new_model(tiny(recipe, finished), kind)
    rng = generator(123)
    batch = draw_batch(rng, 64, fill=kind == "mdlm")

    def loss() -> float:
        with torch.no_grad():
            return float(diffusion_loss(model, batch, generator(5)) if kind == "mdlm" else causal_loss(model, batch))

    before = loss()
    model.load_state_dict(torch.load(finished / f"{kind}.pt", weights_only=True)["model"])
    assert loss() < 0.9 * before


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_an_interrupted_run_ends_with_the_same_bits(
    recipe: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    config, drawn, draw = tiny(recipe, tmp_path), 0, draw_batch

    def interrupted(*arguments: Any, **options: Any) -> ListsBatch:
        nonlocal drawn
        drawn += 1
        if drawn == 12:
            raise KeyboardInterrupt
        return draw(*arguments, **options)

    monkeypatch.setattr(recipe, "draw_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recipe.train(config, World("cpu"), kind)
    assert torch.load(tmp_path / f"{kind}.pt", weights_only=True)["step"] == 11
    recipe.train(config, World("cpu"), kind)
    straight, resumed = (torch.load(out / f"{kind}.pt", weights_only=True) for out in (finished, tmp_path))
    assert straight["step"] == resumed["step"] == 30
    for part in ("model", "average"):
        assert all(torch.equal(straight[part][name], resumed[part][name]) for name in straight[part]), part


def test_an_unknown_stage_is_refused_before_any_work(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no stage 'mdml'; there are mdlm, ar"):
        recipe.run(tiny(recipe, tmp_path / "out", stages="mdlm,mdml"), World("cpu"))
    assert not (tmp_path / "out").exists()


def test_batches_are_prompts_answers_and_ends() -> None:
    for fill, seed in ((True, 1), (True, 2), (True, 3), (False, 4)):
        batch, lengths = draw_batch(generator(seed), 64, fill=fill), set()
        for ids, canvas, valid in zip(batch.ids.tolist(), batch.canvas, batch.valid, strict=True):
            start, places = int(canvas.int().argmax()), int(canvas.sum())
            assert ids[0] == BOS and places <= CANVAS and start <= PROMPT
            assert valid.tolist() == [place < start + places for place in range(len(ids))]
            assert set(ids[start + places :]) <= {PAD}
            prompt, answer = answer_text(ids[1:start]), answer_text(ids[start : start + places])
            assert lists.check(prompt, answer)
            rest = places - len(answer.split())
            assert ids[start + places - rest : start + places] == [EOS] * rest
            lengths.add(rest)
        assert (lengths == {1}) != fill


def test_every_number_of_masks_is_as_likely_and_counts_what_it_should() -> None:
    canvas = torch.zeros(4000, 8, dtype=torch.bool)
    canvas[:, 2:7] = True
    masked, counts = draw_masks(canvas, np.random.default_rng(0))
    assert not (masked & ~canvas).any()
    num = masked.sum(dim=1)
    torch.testing.assert_close(counts, 5 / num)
    assert torch.bincount(num).tolist()[1:] == [800] * 5
    # Each place is masked in k of 5 cases: 3/5 in the mean, and counts 1 in the mean.
    assert masked[:, 2:7].float().mean(dim=0) == pytest.approx([0.6] * 5, abs=0.04)
    assert (masked * counts[:, None]).double().mean(dim=0)[2:7].tolist() == pytest.approx([1.0] * 5, abs=0.08)


def enumerated_bound(model: LlamaForCausalLM, ids: Tensor, start: int) -> float:
    """The diffusion bound on the likelihood of one row, summed over every set of masks."""
    places, total = ids.shape[0] - start, 0.0
    for bits in range(1, 2**places):
        chosen = [start + place for place in range(places) if bits >> place & 1]
        noisy = ids.clone()
        noisy[chosen] = MASK
        logits = model(noisy[None], attention_mask=torch.zeros(1, 1, len(ids), len(ids))).logits[0, chosen]
        among = math.comb(places, len(chosen)) * places
        total += places / len(chosen) * float(F.cross_entropy(logits, ids[chosen], reduction="sum")) / among
    return total


@torch.no_grad()
def test_the_diffusion_loss_is_the_bound_found_by_listing_all_masks() -> None:
    model, row = random_model("mdlm"), torch.tensor([BOS, *token_ids("copy : ant bat = ant bat"), EOS])
    num, start, place = 6000, len(row) - 3, torch.arange(len(row) + 1)
    valid = (place < len(row)).expand(num, -1)  # the last one is padding, which must change nothing
    batch = ListsBatch(torch.cat([row, torch.tensor([PAD])]).expand(num, -1), valid & (place >= start), valid)
    found = float(diffusion_loss(model, batch, np.random.default_rng(0)))
    assert found == pytest.approx(enumerated_bound(model, row, start), rel=0.02)


@torch.no_grad()
def test_the_causal_loss_is_the_likelihood_word_by_word() -> None:
    model, batch = random_model("ar"), draw_batch(generator(9), 5, fill=False)
    total = 0.0
    for ids, canvas in zip(batch.ids, batch.canvas, strict=True):
        for place in canvas.nonzero().flatten().tolist():
            logits = model(ids[None, :place]).logits[0, -1]
            total -= float(logits.log_softmax(-1)[ids[place]])
    assert float(causal_loss(model, batch)) == pytest.approx(total / 5, rel=1e-5)


@torch.no_grad()
def test_padding_changes_nothing_and_all_tokens_see_each_other() -> None:
    model, ids = random_model("mdlm"), torch.randint(5, 50, (1, 9))
    alone = model(ids, attention_mask=full_mask(torch.ones(1, 9, dtype=torch.bool))).logits
    longer = torch.cat([ids, torch.full((1, 4), PAD)], dim=1)
    torch.testing.assert_close(model(longer, attention_mask=full_mask(longer != PAD)).logits[:, :9], alone)
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1 - 5) % 45 + 5
    other = model(changed, attention_mask=full_mask(torch.ones(1, 9, dtype=torch.bool))).logits
    assert not torch.allclose(other[0, 0], alone[0, 0])


def test_the_tokenizer_has_one_token_per_word_and_gives_the_text_back(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(lists.WORDS) + 5
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id", "unk_token_id")
    assert [getattr(tokenizer, name) for name in names] == [PAD, BOS, EOS, MASK, 1]
    for example in lists.examples(60, seed=3):
        ids = tokenizer(example.prompt).input_ids
        assert ids == [BOS, *token_ids(example.prompt)]
        assert len(ids) == 1 + len(example.prompt.split()) <= PROMPT
        assert tokenizer.decode(ids, skip_special_tokens=True) == example.prompt
        answer = tokenizer(example.answer, add_special_tokens=False).input_ids
        assert answer == token_ids(example.answer)
        assert answer_text([*answer, EOS, EOS]) == example.answer
    assert tokenizer("sort : wombat").input_ids[-1] == tokenizer.unk_token_id
