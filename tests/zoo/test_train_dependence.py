"""The recipe for heads that predict dependences: what it measures, that the head learns, and what it exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from partsong import decode, load_text_model
from partsong.errors import ArgumentError
from partsong.samplers.text.dependence.folders import load_dependence
from partsong.samplers.text.dependence.head import least_of_pairs
from partsong_zoo.lists.dependence import dependence_loss, measure_changes, predicted_changes
from partsong_zoo.lists.model import BOS, MASK, full_mask, token_ids
from partsong_zoo.lists.training import ListsBatch, draw_batch
from partsong_zoo.shapes.scenes import generator
from partsong_zoo.training.common import World
from partsong_zoo.training.stage import adam
from tests.recipe_module import loaded

SMALL = {"width": 8, "rank": 4, "batch": 12, "fills": 6, "answers": 12, "draws": 2}


def test_changes_are_those_of_the_model_asked_again() -> None:
    with loaded("train_dependence") as recipe:
        model = recipe.frozen_model(World("cpu"))
    row = torch.tensor([[BOS, *token_ids("replace at any with dog : ant cat owl = ant cat owl")]])
    places = torch.arange(row.shape[1])[None]
    batch = ListsBatch(row, places >= row.shape[1] - 3, torch.ones_like(places, dtype=torch.bool))
    changes = measure_changes(model, batch, generator(5), 4, draws=400)
    for fill in range(4):
        place, masked = int(changes.place[fill]), changes.doubt[0] > 0
        before = row.masked_fill(masked[None], MASK)
        tokens = torch.arange(model.config.vocab_size)
        texts = before.repeat(len(tokens), 1).index_copy(1, changes.place[fill, None], tokens[:, None])
        both = torch.cat([before, texts])
        with torch.no_grad():
            logits = model(input_ids=both, attention_mask=full_mask(batch.valid.expand(both.shape))).logits
        probs = logits.index_fill(-1, torch.tensor([MASK]), -torch.inf).softmax(-1)
        mean = ((probs[1:] - probs[0]).abs().sum(-1) / 2 * probs[0, place, :, None]).sum(0)
        counts = changes.counts[fill]
        # Of 400 draws the mean has a standard error of at most 0.025.
        assert (changes.variation[fill] - mean)[counts].abs().max() < 0.1
        assert not counts[place] and not counts[~masked].any()


def test_a_head_learns_from_changes() -> None:
    with loaded("train_dependence") as recipe:
        model = recipe.frozen_model(World("cpu"))
        head = recipe.new_head(recipe.Config(), model)
    rng = generator(6)
    changes = measure_changes(model, draw_batch(rng, 48, fill=True, late=True), rng, 48)
    optimizer, _ = adam(list(head.parameters()), 3e-3)
    losses = list[float]()
    for _ in range(40):
        loss = dependence_loss(head, changes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
    # A cross-entropy is least at the mean: the sums agree though no single change does.
    counts = changes.counts
    guess, truth = predicted_changes(head, changes)[counts], changes.variation[counts]
    assert float(guess.detach().mean()) == pytest.approx(float(truth.mean()), abs=0.03)


def test_the_recipe_exports_a_head_and_measures_it(tmp_path: Path) -> None:
    with loaded("train_dependence") as recipe:
        config = recipe.Config(out=str(tmp_path), steps=2, **SMALL)
        with pytest.raises(ArgumentError, match="run the stage 'train' first"):
            recipe.run(recipe.Config(out=str(tmp_path), stages="export", **SMALL), World("cpu"))
        recipe.run(config, World("cpu"))
        folder = recipe.exported(config)
    assert load_dependence(folder).settings.rank == 4
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["pairs"] > 0 and 0 < scores["predicted"] < 1
    prompt = [[BOS, *token_ids("shuffle : ant cat owl =")]]
    text = decode("lists-mdlm", prompt, rule=f"variation-bound:head={folder}", max_new_tokens=8)
    assert text.summary()["variation"] is not None


def test_the_head_of_the_zoo_knows_which_tokens_depend_on_each_other() -> None:
    with loaded("train_dependence") as recipe:
        model = recipe.frozen_model(World("cpu"))
    rng, head = generator(7), load_dependence(Path(model.config.name_or_path) / "dependence")
    changes = measure_changes(model, draw_batch(rng, 48, fill=True, late=True), rng, 24, draws=8)
    counts = changes.counts
    guess, truth = predicted_changes(head, changes)[counts], changes.variation[counts]
    limit = changes.at(least_of_pairs(changes.doubt))[counts]
    constant = limit * truth.sum() / limit.sum()
    assert float((guess - truth).square().mean()) < 0.95 * float((constant - truth).square().mean())


def test_the_rule_takes_the_head_beside_the_weights() -> None:
    model = load_text_model("lists-mdlm")
    prompts = [[BOS, *token_ids(text)] for text in ("shuffle : ant cat owl dog =", "copy : ant cat owl dog =")]
    decoded = decode(model, prompts, rule="variation-bound", max_new_tokens=8, temperature=1.0)
    bounds = [tally.variation for tally in decoded.tallies]
    assert all(bound is not None and bound <= 0.01 * decoded.steps for bound in bounds)
    assert decoded.tallies[1].num_forwards < decoded.tallies[0].num_forwards
