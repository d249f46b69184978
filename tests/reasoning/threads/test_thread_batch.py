"""Packed texts of threads: who sees whom by brute force, losses and gradients against texts computed one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from partsong.reasoning.threads import Fork, TokenRun, Tokens, lay_out, replayed
from partsong_zoo.training.thread_batch import ThreadBatch, additive_mask, flex_mask, pack_threads
from partsong_zoo.training.thread_training import ThreadLesson, learned_logits, log_likelihoods, supervised_loss
from tests.reasoning.local_models import llama
from tests.reasoning.test_local_models import tiny


def random_text(dice: random.Random, depth: int = 0, *, given_first: bool = True) -> Tokens:
    """Learned and given runs; a text and what follows a fork begin with given ones."""
    parts: list[TokenRun | Fork] = []
    for _ in range(dice.randint(1, 3)):
        parts.append(_run(dice, given_first))
        given_first = False
        if depth < 2 and dice.random() < 0.5:
            apart = dice.random() < 0.2
            # A thread that reads nothing before it is a text of its own.
            threads = tuple(random_text(dice, depth + 1, given_first=apart) for _ in range(dice.randint(1, 3)))
            parts.append(Fork(threads, apart=apart))
            given_first = not apart
    if given_first:
        parts.append(_run(dice, True))
    return tuple(parts)


def _run(dice: random.Random, given: bool) -> TokenRun:
    return TokenRun(tuple(dice.choices(range(3, 31), k=dice.randint(1, 4))), learn=not given and dice.random() < 0.7)


def texts(seed: int, num: int) -> list[Tokens]:
    dice = random.Random(seed)
    made = [random_text(dice) for _ in range(num)]
    return [replayed(text) if dice.random() < 0.5 else text for text in made]


def places(batch: ThreadBatch, number: int) -> tuple[int, list[int]]:
    """Row and columns of a text."""
    rows, columns = (batch.texts == number).nonzero(as_tuple=True)
    assert len(set(rows.tolist())) == 1
    return int(rows[0]), columns.tolist()


@pytest.mark.parametrize("seed", range(60))
def test_a_token_sees_what_its_text_says_and_nothing_of_others(seed: int) -> None:
    trees = texts(seed, 5)
    rows = [lay_out(tree) for tree in trees]
    longest = max(len(row.tokens) for row in rows)
    batch = pack_threads(trees, length=2 * longest, pad=1)
    assert int((batch.texts >= 0).sum()) == batch.num_tokens == sum(len(row.tokens) for row in rows)
    assert set(batch.ids[batch.texts < 0].tolist()) <= {1}
    assert len(batch.ids) < len(trees)
    sees = batch.mask[:, 0]
    for number, row in enumerate(rows):
        at, columns = places(batch, number)
        assert columns == list(range(columns[0], columns[0] + len(row.tokens)))
        assert batch.ids[at, columns].tolist() == row.tokens
        assert batch.positions[at, columns].tolist() == row.positions
        assert batch.learn[at, columns].tolist() == row.learn
        for query, column in enumerate(columns):
            expected = {columns[key] for key in range(len(columns)) if row.sees(query, key)}
            assert set(sees[at, column].nonzero().flatten().tolist()) == expected
    for at, column in (batch.texts < 0).nonzero().tolist():
        assert sees[at, column].nonzero().flatten().tolist() == [column]
        assert not batch.learn[at, column]
        assert sees[at, :, column].sum() == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_token_is_predicted_where_all_it_follows_was_seen(seed: int) -> None:
    """The source of a learned token is on its own path, and nothing lies between them that the token sees."""
    batch = pack_threads(texts(seed, 3))
    sees = batch.mask[:, 0]
    for row, column in batch.learn.nonzero().tolist():
        source = int(batch.sources[row, column])
        seen = set(sees[row, column].nonzero().flatten().tolist())
        assert set(sees[row, source].nonzero().flatten().tolist()) == seen - {column}


def test_learned_tokens_of_a_replayed_text_are_learned_once() -> None:
    thread = (TokenRun((4,)), TokenRun((5, 6), True))
    text: Tokens = (TokenRun((3,)), Fork((thread, thread, thread)), TokenRun((7,)), TokenRun((8,), True))
    joined, again = pack_threads([text]), pack_threads([replayed(text)])
    for batch in (joined, again):
        assert sorted(batch.ids[batch.learn].tolist()) == [5, 5, 5, 6, 6, 6, 8]
    assert again.num_tokens == joined.num_tokens + 6


# --- losses -----------------------------------------------------------------------------------------------------------


def plain_loss(model: Any, tree: Tokens) -> tuple[Tensor, int]:
    """Sum of negative log-likelihoods: for each learned token one forward of the tokens before it that it sees."""
    row = lay_out(tree)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for place, learned in enumerate(row.learn):
        if not learned:
            continue
        path = [key for key in range(place) if row.sees(place, key)]
        # All of them see what they saw in the text, no more.
        seen = torch.tensor([[row.sees(query, key) for key in path] for query in path])
        bias = torch.where(seen, 0.0, -torch.inf).double()[None, None]
        ids = torch.tensor([[row.tokens[key] for key in path]])
        positions = torch.tensor([[row.positions[key] for key in path]])
        out = model(ids, attention_mask=bias, position_ids=positions, use_cache=False)
        total = total - out.logits[0, -1].log_softmax(-1)[row.tokens[place]]
        count += 1
    return total, count


def summed(model: Any, trees: list[Tokens]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss of the texts one by one, and its gradient."""
    found = [plain_loss(model, tree) for tree in trees]
    loss = torch.stack([each for each, _ in found]).sum() / sum(count for _, count in found)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), gradients


# GPT-2 computes all in the type of its weights. Llama's norms are float32 inside whatever that is, and so is the
# softmax of eager attention.
@pytest.mark.parametrize(
    ("family", "attention", "tolerance"),
    [("gpt2", "sdpa", 1e-12), ("llama", "sdpa", 1e-6), ("qwen3", "sdpa", 1e-6), ("llama", "eager", 1e-6)],
)
def test_the_packed_loss_and_its_gradient_are_those_of_the_texts_one_by_one(
    family: str, attention: str, tolerance: float
) -> None:
    model: Any = tiny(family, initializer_range=0.3)
    model.set_attn_implementation("sdpa")
    trees = texts(7, 6)
    expected, gradients = summed(model, trees)
    model.set_attn_implementation(attention)
    batch = pack_threads(trees, length=100)
    assert len(batch.ids) < len(trees)
    loss = ThreadLesson(model)(batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=tolerance)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            error = (parameter.grad - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-6)
            assert float(error) < 10 * tolerance, name


def test_rows_of_any_length_give_the_same_log_likelihoods() -> None:
    model, trees = llama(), texts(3, 6)
    model.set_attn_implementation("sdpa")
    alone = torch.cat([log_likelihoods(model, pack_threads([tree]), temperature=0.7) for tree in trees])
    longest = max(len(lay_out(tree).tokens) for tree in trees)
    for length in (longest, 2 * longest):
        batch = pack_threads(trees, length=length)
        together = log_likelihoods(model, batch, temperature=0.7)
        of = batch.texts[batch.learn]
        found = torch.cat([together[of == number] for number in range(len(trees))])
        assert torch.allclose(found, alone, atol=1e-12)


@pytest.mark.full
def test_flex_attention_sees_what_the_mask_says() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    batch = pack_threads(texts(5, 8), length=256)
    torch.manual_seed(0)
    query, key, value = (torch.randn(len(batch.ids), 2, 256, 16) for _ in range(3))
    found = flex_attention(query, key, value, block_mask=flex_mask(batch.mask))
    bias = additive_mask(batch.mask, torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    assert torch.allclose(found, expected, atol=1e-5)


def test_marks_reach_the_thought_embeddings() -> None:
    threads = tuple((TokenRun((4,)), TokenRun((5, 6), True)) for _ in range(2))
    tree: Tokens = (TokenRun((3,)), Fork(threads, (1, 2)), TokenRun((7,)), TokenRun((8,), True))
    model = llama()
    model.set_attn_implementation("sdpa")
    thoughts = ThoughtEmbeddings.of(model, num_marks=3)
    handles = thoughts.attach(model)
    batch = pack_threads([tree])
    assert batch.marks.tolist() == [[0, 1, 1, 1, 2, 2, 2, 0, 0]]
    plain = pack_threads([(tree[0], replace(tree[1], marks=()), *tree[2:])])  # type: ignore[type-var]
    with torch.no_grad():
        before = log_likelihoods(model, batch, thoughts=thoughts)
        assert torch.equal(before, log_likelihoods(model, plain))
        thoughts.values[:, 2] += 1.0
        after = log_likelihoods(model, batch, thoughts=thoughts)
    # The first thread has not heard of the second one; the second, and what follows both, have.
    assert torch.equal(after[:2], before[:2]) and bool((after[2:] != before[2:]).all())
    for handle in handles:
        handle.remove()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trees", "said"),
    [
        ([], "at least one text"),
        ([(TokenRun((3,), True),)], "token 0 of text 0"),
        (
            [(TokenRun((3,)),), (TokenRun((3,)), Fork(((TokenRun((4,)),), (TokenRun((5,)),))), TokenRun((6,), True))],
            "token 3 of text 1",
        ),
        ([(TokenRun((3,)), Fork(((TokenRun((4,), True),),), apart=True))], "token 1 of text 0"),
        ([(TokenRun((3,)), Fork(()))], "no threads"),
    ],
)
def test_texts_that_cannot_be_learned_are_refused(trees: list[Tokens], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        pack_threads(trees)


def test_rows_too_short_and_batches_without_a_lesson_are_refused() -> None:
    with pytest.raises(ArgumentError, match="5 tokens does not fit into rows of 4"):
        pack_threads([(TokenRun((3, 4, 5, 6, 7)),)], length=4)
    with pytest.raises(ArgumentError, match="no token of the batch is learned"):
        supervised_loss(llama(), pack_threads([(TokenRun((3, 4)),)]))
    with pytest.raises(ArgumentError, match="temperature=0"):
        log_likelihoods(llama(), pack_threads([(TokenRun((3, 4)),)]), temperature=0)


def test_models_that_would_ignore_the_threads_are_refused() -> None:
    marked = pack_threads([(TokenRun((3,)), Fork(((TokenRun((4,)),),), (1,)))])
    with pytest.raises(UnsupportedError, match="has marks"):
        learned_logits(llama(), marked)
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="flash_attention_2"):
        learned_logits(model, pack_threads([(TokenRun((3, 4)),)]))
