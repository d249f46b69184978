"""The sums recipe runs from nothing to a stock folder and resumes bit by bit; it learns what it claims to."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.evals.reasoning.intervals import wilson
from partsong_zoo.shapes.scenes import generator
from partsong_zoo.sums import answer_of, check, examples, held_out, parse
from partsong_zoo.sums.model import EOS, MODEL, PAD, USER, VOCABULARY, build_model, build_tokenizer, decode, encode
from partsong_zoo.sums.prompts import again, tally
from partsong_zoo.sums.sampling import Draft, draft_pool, sample
from partsong_zoo.sums.scoring import pdr, random_k, vote
from partsong_zoo.sums.training import (
    LESSONS,
    Attempts,
    SumsBatch,
    SumsRow,
    draw_batch,
    ending,
    first_row,
    invent,
    later_row,
    loss_of,
    pack,
    row_ids,
)
from partsong_zoo.training.common import World
from tests.recipe_module import assert_refused_before_any_work, loaded

POOL = [
    Attempts("3+4+5=?", "3+4=7, 7+5=12. answer: 12", ("4+5=9, 3+9=12. answer: 12", "3+4=8, 8+5=13. answer: 13")),
    Attempts(
        "make 9 from 4 5",
        "4+5=9: yes. answer: 4+5",
        ("5-4=1: no. answer: none", "4*5=20: no. answer: none", "4+5=8: yes. answer: 4+"),
    ),
]


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    with loaded("train_sums") as module:
        yield module


def tiny(recipe: ModuleType, out: Path, **changed: Any) -> Any:
    """A miniature of the recipe that saves after every step."""
    sizes = {
        "drafts_steps": 24,
        "refine_steps": 8,
        "large_steps": 12,
        "single_steps": 4,
        "polish_steps": 6,
        "batch": 16,
        "heads": 1,
        "depth": 1,
        "pool": 6,
        "pool_drafts": 3,
    }
    return recipe.Config(out=str(out), **{**sizes, "problems": 2, "save_minutes": 0.0, **changed})


@pytest.fixture(scope="module")
def finished(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    # A model that has learned next to nothing never ends a draft, and a pool of none is no pool.
    recipe.run(tiny(recipe, out, stages="drafts"), World("cpu"))
    said = [[one.question, one.solution, list(one.drafts)] for one in POOL]
    (out / "pool.json").write_text(json.dumps(said))
    recipe.run(tiny(recipe, out, stages="refine,polish,export,evaluate"), World("cpu"))
    return out


@pytest.mark.full
def test_the_recipe_makes_a_stock_folder_and_scores(finished: Path) -> None:
    folder = finished / "export" / "sums"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".jinja"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    report = json.loads((finished / "scores.json").read_text())
    for family in ("sum", "countdown"):
        ways = report[family]
        assert {"greedy", "single", "vote of 8", "vote of 16", "pdr 8-4-1 random-4", "pdr 8-4-1 summary"} <= set(ways)
        for row in ways.values():
            assert 0 <= row["interval"][0] <= row["right"] <= row["interval"][1] <= 100
            assert 0 < row["critical"] <= row["tokens"]


def test_training_lowers_the_loss_on_data_it_has_not_seen(recipe: ModuleType, finished: Path) -> None:
    model, batch = recipe.new_model(tiny(recipe, finished)), draw_batch(generator(123), 64)
    with torch.no_grad():
        before = float(loss_of(model, batch))
        model.load_state_dict(torch.load(finished / "drafts.pt", weights_only=True)["model"])
        assert float(loss_of(model, batch)) < 0.9 * before


@pytest.mark.full
@pytest.mark.parametrize(("kind", "steps"), [("drafts", 24), ("refine", 8), ("polish", 6)])
def test_an_interrupted_run_ends_with_the_same_bits(
    recipe: ModuleType, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, steps: int
) -> None:
    config, drawn, draw = tiny(recipe, tmp_path), 0, draw_batch
    for name in {"refine": ("drafts.pt", "pool.json"), "polish": ("refine.pt", "pool.json")}.get(kind, ()):
        (tmp_path / name).write_bytes((finished / name).read_bytes())

    def interrupted(*arguments: Any, **options: Any) -> SumsBatch:
        nonlocal drawn
        drawn += 1
        if drawn == 4:
            raise KeyboardInterrupt
        return draw(*arguments, **options)

    monkeypatch.setattr(recipe, "draw_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recipe.train(config, World("cpu"), kind)
    assert torch.load(tmp_path / f"{kind}.pt", weights_only=True)["step"] == 3
    recipe.train(config, World("cpu"), kind)
    straight, resumed = (torch.load(out / f"{kind}.pt", weights_only=True) for out in (finished, tmp_path))
    assert straight["step"] == resumed["step"] == steps
    for part in ("model", "average"):
        assert all(torch.equal(straight[part][name], resumed[part][name]) for name in straight[part]), part


def test_stages_out_of_turn_and_unknown_ones_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no stage 'draft'; there are drafts, samples"):
        recipe.run(tiny(recipe, tmp_path / "out", stages="drafts,draft"), World("cpu"))
    assert not (tmp_path / "out").exists()
    for stage, missing in (("refine", "drafts"), ("polish", "refine"), ("samples", "drafts"), ("export", "drafts")):
        with pytest.raises(ArgumentError, match=f"run the stage '{missing}' first"):
            recipe.run(tiny(recipe, tmp_path / "out", stages=stage), World("cpu"))

    (tmp_path / "out" / "pool.json").write_text("[]")
    with pytest.raises(ArgumentError, match="the model finished no draft; raise drafts_steps"):
        recipe.read_pool(tmp_path / "out" / "pool.json")


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_the_tokenizer_gives_the_text_back(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(VOCABULARY)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD, USER, EOS)
    texts = [text for one in examples(60, seed=3) for text in (one.question, one.solution)]
    texts += [again(one.question, one.drafts) for one in POOL] + [tally(one.question, one.drafts) for one in POOL]
    for text in texts:
        ids = encode(text)
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == decode([*ids, EOS, PAD, PAD]) == text
    assert tokenizer("Make 3 from 1 2").input_ids == encode("make 3 from 1 2")
    assert tokenizer("3 + 4 = ?").input_ids == encode("3+4=?")
    assert tokenizer.unk_token_id in tokenizer("why?").input_ids


def test_a_chat_is_what_training_shows(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    row = SumsRow(again(POOL[0].question, POOL[0].drafts), POOL[0].solution)
    chat = [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": row.answer}]
    asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    ids, learned = row_ids(row)
    assert tokenizer.apply_chat_template(chat)["input_ids"] == ids
    assert asked == ids[: learned.index(True)]
    assert tokenizer.decode(asked, skip_special_tokens=True) == row.prompt
    with pytest.raises(jinja2.TemplateError, match="no role but user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}])


# --- what is learned --------------------------------------------------------------------------------------------------


def test_of_failed_work_only_values_and_the_verdict_are_learned() -> None:
    ids, learned = row_ids(SumsRow("make 9 from 4 5 2", "5-4=1, 12+1=13: no. answer: none", honest=True))
    assert decode([*ids[: ids.index(EOS)]]).startswith("<user>make 9 from 4 5 2<model>5-4=1, 12+1=13: no.")
    texts = {index: text for text, index in VOCABULARY.items()}
    assert [texts[i] for i, known in zip(ids, learned, strict=True) if known] == [
        *("1", ", ", "1", "3", ": no. answer: ", "none", "<eos>")
    ]
    ids, learned = row_ids(SumsRow("3+4=?", "3+4=7. answer: 7"))
    assert learned == [False] * (ids.index(MODEL) + 1) + [True] * len([*encode("3+4=7. answer: 7"), EOS])


def test_first_rows_are_right_or_honest_and_never_kept_problems() -> None:
    rng, kinds = random.Random(1), set()
    for _ in range(300):
        row = first_row(rng, "countdown", failed=0.5)
        assert not held_out(parse(row.prompt))
        assert check(row.prompt, row.answer) != row.honest
        assert row.honest == (answer_of(row.answer) is None)
        kinds.add(row.honest)
    assert kinds == {True, False}
    assert not any(held_out(parse(first_row(rng, "sum", 0.5).prompt)) for _ in range(50))


def test_later_rows_repeat_the_first_right_attempt_or_solve_anew() -> None:
    rng, copied = random.Random(2), 0
    for _ in range(150):
        row = later_row(rng, POOL, "again", 4)
        question, *lines = row.prompt.split("\n")
        shown = [line.partition(")")[2] for line in lines if line]
        assert not held_out(parse(question)) or question in {one.question for one in POOL}
        assert 1 <= len(shown) <= 4 and check(question, row.answer)
        right = [draft for draft in shown if check(question, draft)]
        assert row.answer == ending(right[0]) if right else row.answer not in shown
        copied += bool(right)
        listing = later_row(rng, POOL, "distil", 8)
        assert listing.prompt.startswith("list:") and listing.answer.startswith("found: ")
        assert "\nfound: " in later_row(rng, POOL, "listed", 8).prompt
    assert 60 <= copied <= 140


def test_invented_attempts_are_many_and_right_where_they_say_so() -> None:
    rng, said = random.Random(4), set()
    for _ in range(40):
        one = invent(rng)
        assert not held_out(parse(one.question))
        assert len(one.drafts) >= 4 and one.solution in one.drafts
        for draft in one.drafts:
            assert check(one.question, draft) == (answer_of(draft) is not None)
            said.add((parse(one.question).family, check(one.question, draft)))
    assert said == {("sum", True), ("countdown", True), ("countdown", False)}


def test_batches_follow_the_seed() -> None:
    for seed, lesson in itertools.product(range(4), LESSONS):
        one, other = (draw_batch(generator(seed), 8, lesson, POOL) for _ in range(2))
        assert torch.equal(one.ids, other.ids) and torch.equal(one.learned, other.learned)
        assert not (one.learned & (one.ids == PAD)).any() and one.learned.any(dim=1).all()
    assert not torch.equal(draw_batch(generator(0), 8).ids, draw_batch(generator(1), 8).ids)


@torch.no_grad()
def test_the_loss_is_the_likelihood_token_by_token_and_padding_changes_nothing() -> None:
    torch.manual_seed(0)
    model = build_model(heads=1, depth=2)
    rows = [SumsRow("3+4=?", "3+4=7. answer: 7"), SumsRow("make 9 from 4 5", "5-4=1: no. answer: none", honest=True)]
    losses: list[torch.Tensor] = []
    for row in rows:
        ids, learned = row_ids(row)
        for place in range(len(ids)):
            if learned[place]:
                logits = model(torch.tensor([ids[:place]])).logits[0, -1]
                losses.append(F.cross_entropy(logits, torch.tensor(ids[place])))
    assert float(loss_of(model, pack(rows))) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


# --- sampling and scoring ---------------------------------------------------------------------------------------------


def test_drafts_follow_seed_and_order_and_greedy_ones_stand_alone() -> None:
    torch.manual_seed(0)
    model = build_model(heads=1, depth=2).eval()
    prompts = [one.question for one in examples(5, seed=4)]
    first = sample(model, prompts, seed=3, most=12)
    assert first == sample(model, prompts, seed=3, most=12)
    assert first != sample(model, prompts, seed=4, most=12)
    greedy = sample(model, prompts, seed=None, most=12)
    for prompt, draft in zip(prompts, greedy, strict=True):
        ids = [USER, *encode(prompt), MODEL]
        assert draft.read == len(ids)
        for _ in range(draft.written):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert decode(ids[draft.read :]) == draft.text
        assert draft.finished == (ids[-1] == EOS)
    with pytest.raises(ArgumentError, match="do not fit into 1024"):
        sample(model, ["3+4=?"], most=1020)
    assert draft_pool(model, 4, 2, seed=1) == draft_pool(model, 4, 2, seed=1)


def test_votes_and_intervals() -> None:
    drafts = [
        Draft(f"1+1=2. answer: {said}", said != "5", 3, 4) for said in ("none", "3", "2", "5", "5", "5", "2", "3")
    ]
    assert vote(drafts) == "3"
    assert vote(drafts[:1]) is None
    low, high = wilson(0, 10)
    assert (low, high) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.2775, abs=1e-4))
    assert wilson(250, 500) == (pytest.approx(0.4563, abs=1e-4), pytest.approx(0.5437, abs=1e-4))


def test_rounds_count_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def scripted(model: Any, prompts: list[str], *, seed: int | None = 0, most: int = 88) -> list[Draft]:
        asked.extend(prompts)
        return [Draft("3+4=7. answer: 7", True, 20, 10 + place) for place in range(len(prompts))]

    monkeypatch.setattr("partsong_zoo.sums.scoring.sample", scripted)
    first = [[Draft("3+4=8. answer: 8", True, 5, 9 + place) for place in range(4)]]
    found = pdr(None, ["3+4=?"], first, (2, 1), random_k(4), 0)  # pyright: ignore[reportArgumentType]
    assert (found.right, found.total, found.read) == (1, 1, 4 * 5 + 3 * 20)
    assert (found.tokens, found.critical) == (9 + 10 + 11 + 12 + 10 + 11 + 10, 12 + 11 + 10)
    assert [prompt.count("answer: ") for prompt in asked] == [4, 4, 2]


def test_a_folder_stands_for_stages_that_were_not_run(recipe: ModuleType, finished: Path, tmp_path: Path) -> None:
    start = finished / "export" / "sums"
    config = tiny(recipe, tmp_path, start=str(start), stages="polish,export", polish_steps=2)
    (tmp_path / "pool.json").write_text((finished / "pool.json").read_text())
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    began = recipe.load_average(config, "refine").state_dict()
    torch.testing.assert_close(began, before, rtol=0, atol=0)
    recipe.run(config, World("cpu"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "sums").state_dict()
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved < 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "nothing"}, "no model in 'nothing': it has no config.json"),
        ({"heads": 2}, "cannot begin with .*: its .* is .*, and this recipe's is .*; give the recipe the sizes"),
    ],
)
def test_a_wrong_folder_to_begin_with_is_refused_before_any_work(
    recipe: ModuleType, finished: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    start = {"start": str(finished / "export" / "sums")}
    assert_refused_before_any_work(recipe, tiny(recipe, tmp_path / "new", stages="polish", **start | changes), message)
