"""Paths and their summary: texts of training are what the runtime computes, and the recipe runs from pool to folder."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.threads.paths import Config, Given, family_rows
from partsong.errors import ArgumentError
from partsong.reasoning import Parameters, Run
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.threads.layout import TokenRun, Tokens, encoded, lay_out
from partsong_zoo.chat_model import EOS, MODEL, USER
from partsong_zoo.folders import load_folder
from partsong_zoo.sums import check
from partsong_zoo.sums.model import VOCABULARY, build_model
from partsong_zoo.sums.paths import (
    FORM,
    MOST_PATHS,
    WORDS,
    draw_texts,
    lesson_of,
    load_engine,
    path_answer,
    save_paths,
    text_of,
    widened,
)
from partsong_zoo.sums.scoring import voted
from partsong_zoo.sums.training import Attempts
from partsong_zoo.training.common import World
from partsong_zoo.training.rollouts import drawn_parts
from partsong_zoo.training.thread_batch import pack_threads
from partsong_zoo.training.thread_training import learned_logits
from tests.recipe_module import loaded

QUESTION = "make 13 from 3 7 2"
RIGHT, WRONG = "3*2=6, 6+7=13: yes. answer: 3*2+7", "3+7=10, 10*2=20: no. answer: none"


def test_a_text_has_paths_apart_and_a_summary_of_all() -> None:
    row = lay_out(text_of("3+4=?", ["3+4=7", "4+3=8"], ". answer: 7", [2, 5], learned=1))
    words = [WORDS.texts[token] for token in row.tokens]
    first, second, summary = (words.index(tag) for tag in ("<think2>", "<think5>", "<summary>"))
    assert "".join(words[first:]) == "<think2>3+4=7</think2><think5>4+3=8</think5><summary>. answer: 7</summary><eos>"
    assert row.positions[first] == row.positions[second] and row.positions[summary] == row.positions[summary - 1] + 1
    assert row.marks[first:summary] == [2] * 7 + [5] * 7 and {*row.marks[:first], *row.marks[summary:]} == {0}
    assert not row.sees(second, first) and row.sees(summary, first) and row.sees(summary, second)
    # The second path and the summary are learned, but not the tags that the runtime writes.
    assert [place for place, learn in enumerate(row.learn) if learn] == [
        *range(second + 1, summary), *range(summary + 1, len(words))
    ]  # fmt: skip


def test_the_summary_ends_like_a_right_path_and_all_numbers_are_learned() -> None:
    pool = [Attempts(QUESTION, "7*2=14, 14-3=11: yes. answer: 7*2-3", (*[WRONG] * 7, RIGHT))]
    rng, seen, counts, learned = random.Random(3), set[int](), set[int](), set[int]()
    for _ in range(30):
        batch = draw_texts(rng, pool, 300)
        for number in range(int(batch.texts.max()) + 1):
            ids, learn = (each[batch.texts == number] for each in (batch.ids, batch.learn))
            text = "".join(WORDS.texts[token] for token in ids.tolist())
            assert text.endswith("</summary><eos>") and ": no" not in text
            answer = text.rpartition("answer: ")[2].partition("<")[0]
            assert check(QUESTION, answer) == ("6+7=13" in text)
            marks = batch.marks[batch.texts == number]
            own = {*marks[learn].tolist()} - {0}
            assert len(own) < 2 and 0 in marks[learn]  # the summary, and one path at most
            learned |= own
            seen |= {*marks.tolist()} - {0}
            counts.add(text.count("<think"))
    assert seen == {*range(1, MOST_PATHS + 1)} and counts == {1, 2, 4, 8} and len(learned) > 4


@torch.no_grad()
def test_a_widened_model_answers_as_before_and_begins_paths_like_answers() -> None:
    torch.manual_seed(0)
    model = build_model(1, 2).eval()
    wide, text = widened(model).eval(), "3*2=6, 6+7=13"
    old = torch.tensor([[VOCABULARY["<user>"], MODEL, *(VOCABULARY[one] for one in text if one != ",")]])
    new = torch.tensor([[WORDS.ids[name] for name in _texts(old[0].tolist())]])
    known = [WORDS.ids[one] for one in VOCABULARY]
    assert torch.allclose(wide(new).logits[..., known], model(old).logits, atol=1e-6)
    weight = wide.get_parameter("model.embed_tokens.weight")
    assert torch.equal(weight[WORDS.ids["<think8>"]], weight[MODEL])


def _texts(ids: list[int]) -> list[str]:
    names = {index: text for text, index in VOCABULARY.items()}
    return [names[index] for index in ids]


def test_the_runtime_computes_what_is_trained(tmp_path: Path) -> None:
    """Greedy paths and summary, drawn with joined keys, are the likeliest tokens of one forward with the mask."""
    torch.manual_seed(4)
    lesson: Any = lesson_of(build_model(2, 2, WORDS))
    for parameter in lesson.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_paths(lesson, tmp_path)
    batch = pack_threads([asyncio.run(drawn(load_engine(tmp_path)))])
    trained: Any = lesson_of(load_folder(tmp_path))
    trained.model.set_attn_implementation("eager")

    def likeliest() -> torch.Tensor:
        with torch.no_grad():
            return learned_logits(trained.model, batch, trained.thoughts).argmax(-1)

    without = likeliest()
    trained.thoughts.load_state_dict(lesson.thoughts.state_dict())
    tokens = batch.ids[batch.learn]
    assert len(tokens) > 20 and {*batch.marks[batch.learn].tolist()} == {0, 1, 2, 3}
    assert torch.equal(likeliest(), tokens) and not torch.equal(without, tokens)


async def drawn(engine: LocalEngine) -> Tokens:
    """The question, three paths and a summary, with the tokens that were drawn as learned ones."""
    run, limits = Run(engine), Parameters(temperature=0.0, max_tokens=12)
    knobs: dict[str, Any] = {"format": FORM.name, "num": 3, "teach": False, "thread_tokens": 12}
    answer = await fork_join(run, "3+4=?", extract=path_answer, parameters=limits, **knobs)
    await engine.close()
    parts = encoded(drawn_parts(run, answer, FORM, EOS), WORDS.encode)
    return (TokenRun((USER, *WORDS.encode("3+4=?"), MODEL)), *parts)


def test_votes_and_scores() -> None:
    assert voted(["8", None, "7", "7"]) == "7" and voted(["8", "7"]) == "8" and voted([None]) is None
    one = Given("3+4=?", {2: "7", 4: "8"}, ["8", "7", "7", None], {1: 9.0, 2: 9.0, 4: 9.0})
    other = Given("3+5=?", {2: "8", 4: "8"}, ["8", "8", "8", "8"], {1: 5.0, 2: 5.0, 4: 7.0})
    assert one.scores() == {
        "summary 1": 0.5, "summary 2": 1, "vote 2": 0, "any 2": 1, "summary 4": 0, "vote 4": 1, "any 4": 1
    }  # fmt: skip
    first, second, third = family_rows([one, other], Config(models=(), paths=(1, 2, 4)))
    assert (first["summary"], second["summary"], third["summary"]) == (0.75, 1.0, 0.5)
    assert (second["to_one"], second["to_vote"], third["to_vote"]) == (0.25, 0.5, -0.5)
    assert third["tokens_critical"] == 8.0 and "vote" not in first


@pytest.fixture
def recipe() -> Iterator[ModuleType]:
    with loaded("train_paths") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **changed: Any) -> Any:
    """A miniature of the recipe."""
    return recipe.Config(out=str(out), **{"problems": 2, "steps": 3, "tokens": 200, "save_minutes": 0.0, **changed})


def test_the_recipe_makes_a_stock_folder_with_thoughts(recipe: ModuleType, tmp_path: Path) -> None:
    recipe.run(tiny(recipe, tmp_path), World("cpu"))
    folder = tmp_path / "export" / "0"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM and {p.dtype for p in model.parameters()} == {torch.float32}
    text = "<think1>3+4=7</think1><summary>. answer: 7</summary>"
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == WORDS.encode(text)
    pool = json.loads((tmp_path / "pool.json").read_text())
    assert [len(one["drafts"]) <= MOST_PATHS for one in pool] == [True, True]
    saved = torch.load(tmp_path / "paths-0.pt", weights_only=True)["model"]
    begun = recipe.new_lesson().state_dict()
    assert saved["thoughts.keys"].abs().max() > 0 and begun["thoughts.keys"].abs().max() == 0
    # Pool and checkpoint are there, so another run changes nothing.
    before = (tmp_path / "pool.json").stat().st_mtime_ns
    recipe.run(tiny(recipe, tmp_path), World("cpu"))
    assert (tmp_path / "pool.json").stat().st_mtime_ns == before


def test_stages_out_of_turn_and_unknown_ones_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    for stages, said in (("learn", "no stage 'learn'"), ("train", "stage 'pool'"), ("export", "stage 'train' first")):
        with pytest.raises(ArgumentError, match=said):
            recipe.run(tiny(recipe, tmp_path, stages=stages), World("cpu"))
