"""What students are shown: recorded trajectories, masks drawn row by row, sampled answers and their slices."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaForCausalLM

from partsong import zoo
from partsong.errors import ArgumentError
from partsong_zoo import lists
from partsong_zoo.lists.model import CANVAS, EOS, MASK, PAD, answer_text, full_mask
from partsong_zoo.lists.rollouts import log_probs_of, roll_out_lists
from partsong_zoo.lists.scoring import answers
from partsong_zoo.lists.speed import measure_speed, measure_spread
from partsong_zoo.lists.trajectories import (
    MANY_ANSWERS,
    RECORDED,
    ListTrajectories,
    corrupted,
    decode_one_by_one,
    extended,
    half_masks,
    level_masks,
    sample_trajectories,
    snapshot_masks,
    state_masks,
)


@pytest.fixture(scope="module")
def teacher() -> LlamaForCausalLM:
    return zoo.load("lists-mdlm").model


@pytest.fixture(scope="module")
def texts(teacher: LlamaForCausalLM) -> ListTrajectories:
    return sample_trajectories(teacher, 40, seed=1, batch=16)


def prompts(family: str, num: int) -> list[str]:
    return [example.prompt for example in lists.examples(num, seed=5, families=[family])]


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def answer_of(texts: ListTrajectories, row: int) -> str:
    return answer_text(texts.ids[row][texts.canvas[row]].tolist())


@pytest.mark.parametrize("family", [pytest.param("chain", marks=pytest.mark.full), "sort"])
def test_the_likeliest_answers_are_those_of_the_plain_decoder(teacher: LlamaForCausalLM, family: str) -> None:
    asked = prompts(family, 6)
    mine = decode_one_by_one(teacher, asked, torch.zeros(6, dtype=torch.bool), seed=0)
    assert [answer_of(mine, row) for row in range(6)] == answers(teacher, asked, canvas=RECORDED)


def test_texts_are_right_and_every_place_has_its_step(texts: ListTrajectories) -> None:
    assert 25 < len(texts.ids) <= 40
    for row in range(len(texts.ids)):
        canvas = texts.canvas[row]
        start = int(canvas.int().argmax())
        assert sorted(texts.order[row][canvas].tolist()) == list(range(RECORDED))
        assert set(texts.order[row][~canvas].tolist()) == {-1}
        assert lists.check(answer_text(texts.ids[row, 1:start].tolist()), answer_of(texts, row))
        after = texts.ids[row][canvas].tolist()[len(answer_of(texts, row).split()) :]
        assert after == [EOS] * len(after)


def test_answers_are_drawn_where_there_are_many(teacher: LlamaForCausalLM) -> None:
    asked = prompts("shuffle", 1) * 12
    likeliest, drawn = (
        decode_one_by_one(teacher, asked, torch.full((12,), sampled), seed=3) for sampled in (False, True)
    )
    assert len({answer_of(likeliest, row) for row in range(12)}) == 1
    assert len({answer_of(drawn, row) for row in range(12)}) > 6
    assert set(MANY_ANSWERS) < set(lists.FAMILIES)


def test_a_longer_canvas_has_more_ends_of_text(texts: ListTrajectories) -> None:
    longer = extended(texts, CANVAS)
    assert (longer.canvas.sum(1) == CANVAS).all()
    for row in range(len(texts.ids)):
        assert answer_of(longer, row) == answer_of(texts, row)
        assert sorted(longer.order[row][longer.canvas[row]].tolist()) == list(range(CANVAS))
        before, after = (each.order[row][each.canvas[row]] for each in (texts, longer))
        assert after[:RECORDED].argsort().tolist() == before.argsort().tolist(), "the old places keep their order"
        last = int(after[RECORDED - 1])
        assert after[RECORDED:].tolist() == list(range(last + 1, last + 1 + CANVAS - RECORDED))
    assert longer.ids[longer.canvas].ne(PAD).all()
    with pytest.raises(ArgumentError, match="places=25"):
        extended(texts, 25)


# --- masks ------------------------------------------------------------------------------------------------------------


def own_block(canvas: torch.Tensor, first: torch.Tensor, second: torch.Tensor, width: int) -> int:
    """The start of a row's block, which its two masks tell: shown before, in one of them within, in both after."""
    one, two = first[canvas].tolist(), second[canvas].tolist()
    starts = [
        start
        for start in range(0, len(one), width)
        if not any(one[:start] + two[:start])
        and all(a != b for a, b in zip(one[start : start + width], two[start : start + width], strict=True))
        and all(one[start + width :] + two[start + width :])
    ]
    assert len(starts) == 1
    assert not (first | second)[~canvas].any()
    return starts[0]


def test_every_row_has_its_own_mask(texts: ListTrajectories) -> None:
    """Not one mask for the batch: blocks and halves differ from row to row, each whole in itself."""
    many = texts.rows(torch.zeros(200, dtype=torch.int64))  # the same text, so that only the draws differ
    first, second = half_masks(many.canvas, 4, draw())
    starts = [own_block(many.canvas[row], first[row], second[row], 4) for row in range(200)]
    assert [starts.count(start) for start in (0, 4, 8)] == pytest.approx([67, 67, 67], abs=25)
    halves = {tuple(first[row].tolist()) for row in range(200) if starts[row] == 8}
    assert len(halves) > 10
    shares = torch.stack([first[row][many.canvas[row]][8:].float() for row in range(200) if starts[row] == 8])
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.1)


def test_snapshots_mask_what_was_decided_late(texts: ListTrajectories) -> None:
    """With one block as wide as the canvas a snapshot is a moment of the trajectory, worked out row by row."""
    ratio = torch.linspace(0, 1, len(texts.ids))
    first, second = snapshot_masks(texts, RECORDED, ratio, draw())
    for row, share in enumerate(ratio.tolist()):
        shown = round((1 - share) * RECORDED + 1e-6)
        late = [step >= shown for step in texts.order[row][texts.canvas[row]].tolist()]
        assert first[row][texts.canvas[row]].tolist() == late
        assert second[row][texts.canvas[row]].tolist() == [not each for each in late]
    first, second = snapshot_masks(texts, 4, torch.full((len(texts.ids),), 0.5), draw(1))
    starts = [own_block(texts.canvas[row], first[row], second[row], 4) for row in range(len(texts.ids))]
    assert len(set(starts)) == 3


def test_states_and_levels_follow_the_order(texts: ListTrajectories) -> None:
    decided = torch.arange(len(texts.ids)) % RECORDED
    masks = state_masks(texts, decided)
    assert masks.sum(1).tolist() == (RECORDED - decided).tolist()
    assert bool((texts.order[masks] >= decided[:, None].expand_as(masks)[masks]).all())
    masks, learned = level_masks(texts, 5, draw())
    for row in range(len(texts.ids)):
        steps = sorted(texts.order[row][learned[row]].tolist())
        assert steps in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11])
        assert int(masks[row].sum()) == RECORDED - steps[0]
    assert len({int(each) for each in masks.sum(1)}) == 3


def test_corruption_is_half_masks_and_half_other_tokens(texts: ListTrajectories) -> None:
    many = texts.rows(torch.arange(len(texts.ids)).repeat(40))
    tokens, chosen = corrupted(many, torch.full((len(many.ids),), 0.4), draw())
    assert not (chosen & ~many.canvas).any()
    assert torch.equal(tokens[~chosen], many.ids[~chosen]) and (tokens[chosen] != many.ids[chosen]).all()
    assert set(tokens[chosen].tolist()) - {MASK} <= set(many.ids[many.canvas].tolist())
    assert float((tokens[chosen] == MASK).float().mean()) == pytest.approx(0.5, abs=0.06)
    assert float(chosen[many.canvas].float().mean()) == pytest.approx(0.4, abs=0.05)
    nothing, where = corrupted(many, torch.zeros(len(many.ids)), draw())
    assert torch.equal(nothing, many.ids) and not where.any()


# --- sampled answers --------------------------------------------------------------------------------------------------


def test_slices_are_the_forwards_that_made_the_answers(teacher: LlamaForCausalLM) -> None:
    asked = [*prompts("sort", 2), *prompts("shuffle", 2)]
    rolled = roll_out_lists(teacher, asked, 3, draw(), threshold=0.5)
    assert rolled.right.shape == rolled.speed.shape == (4, 3)
    assert rolled.right[:2].all()
    for number in range(12):
        mine = (rolled.answer == number).nonzero().flatten()
        states, tokens, decided = rolled.states[mine], rolled.tokens[mine], rolled.decided[mine]
        assert torch.equal(states[1:], tokens[:-1]), "each forward reads what the one before decided"
        assert torch.equal(tokens != states, decided) and (states[decided] == MASK).all()
        start = 1 + len(asked[number // 3].split())
        text = tokens[-1, start : start + RECORDED].tolist()
        assert bool(rolled.right.flatten()[number]) == lists.check(asked[number // 3], answer_text(text))
        size = text.index(EOS) + 1
        assert MASK not in text[:size]
        assert float(rolled.speed.flatten()[number]) == pytest.approx(size / len(mine))


def test_a_low_threshold_decides_one_token_per_forward(teacher: LlamaForCausalLM) -> None:
    rolled = roll_out_lists(teacher, prompts("chain", 3), 2, draw(), threshold=0.0)
    assert (rolled.decided.sum(1) == 1).all() and (rolled.speed <= 1).all()


@torch.no_grad()
def test_log_probabilities_are_those_of_the_states(teacher: LlamaForCausalLM) -> None:
    rolled = roll_out_lists(teacher, prompts("add", 2), 2, draw())
    measured = log_probs_of(teacher, rolled)
    place = 0
    for state, tokens, decided in zip(rolled.states, rolled.tokens, rolled.decided, strict=True):
        logits = teacher(state[None], attention_mask=full_mask(state[None] != PAD)).logits[0].double()
        for position in decided.nonzero().flatten().tolist():
            total = sum(math.exp(float(logit)) for token, logit in enumerate(logits[position]) if token != MASK)
            expected = float(logits[position, tokens[position]]) - math.log(total)
            assert float(measured[place]) == pytest.approx(expected, abs=1e-4)
            place += 1
    assert place == len(measured)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_speed_and_accuracy_are_counted(teacher: LlamaForCausalLM) -> None:
    asked = lists.examples(10, seed=2, families=["copy"])
    slow, fast = (measure_speed(teacher, asked, rule) for rule in ("quota:by=left", "quota:per_step=24"))
    sizes = sum(len(example.answer.split()) + 1 for example in asked)
    assert slow["accuracy"] == fast["accuracy"] == 1.0
    assert slow["tokens"] == fast["tokens"] == slow["forwards"] == sizes
    assert fast["forwards"] == 10 and fast["tokens_per_forward"] == sizes / 10


@pytest.mark.full
def test_spread_tells_a_collapsed_sampler_from_an_even_one(teacher: LlamaForCausalLM) -> None:
    prompt = "remove at any : ant dog cat ="
    drawn = measure_spread(teacher, prompt, "quota", num=150)
    cold = measure_spread(teacher, prompt, "quota", num=150, temperature=1e-4)
    assert (drawn["answers"], drawn["distinct"]) == (3, 3) and drawn["valid"] > 0.9
    assert cold["distinct"] == 1 and cold["total_variation"] == pytest.approx(2 / 3, abs=1e-6)
    assert drawn["total_variation"] < 0.5
    counts = torch.multinomial(torch.ones(2000, 3), 150, replacement=True, generator=draw())
    shares = torch.stack([(counts == answer).float().mean(1) for answer in range(3)], 1)
    assert drawn["floor"] == pytest.approx(float((shares - 1 / 3).abs().sum(1).mean()) / 2, rel=0.05)
    assert drawn["expected_distinct"] == pytest.approx(3.0, abs=1e-6)
