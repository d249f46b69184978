"""Drafts verified by the model's own keyed draws: whatever was guessed, the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.match import Process, match

VOCABULARY, LENGTH, END = 5, 12, 4


def logits_after(text: Sequence[int]) -> Tensor:
    """Stands for a model: logits that depend on the last three tokens."""
    seed = 1 + sum((token + 1) * 7**place for place, token in enumerate(text[-3:]))
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def plain(own: TokenDraw, process: Callable[[Sequence[int], Tensor], Tensor] | None = None) -> list[int]:
    """Decodes one token after the other."""
    text = list[int]()
    while len(text) < LENGTH and END not in text:
        row = logits_after(text)
        row = row if process is None else process(text, row)
        text += draw(row[None], [TokenDraw(own.temperature, own.top_p, own.seed, len(text))])
    return text


def speculative(own: TokenDraw, drafts: Callable[[list[int]], DraftTree], process: Process | None = None) -> list[int]:
    text = list[int]()
    while len(text) < LENGTH and END not in text:
        draft = drafts(text)
        texts = [text + [draft.tokens[n - 1] for n in draft.ancestors(node)[1:]] for node in range(len(draft) + 1)]
        logits = torch.stack([logits_after(each) for each in texts])
        here = TokenDraw(own.temperature, own.top_p, own.seed, len(text))
        after = None if process is None else lambda prefix, row, text=tuple(text): process([*text, *prefix], row)
        text += match(draft, logits, here, ends={END}, process=after).tokens
    return text[:LENGTH]


@some.composite
def trees(some_of: some.DrawFn) -> DraftTree:
    tokens, parents = list[int](), list[int]()
    for _ in range(some_of(some.integers(0, 7))):
        parent, token = some_of(some.integers(0, len(tokens))), some_of(some.integers(0, VOCABULARY - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


@settings(max_examples=150, deadline=None)
@given(trees(), some.integers(0, 2**63 - 1), some.sampled_from([(0.0, 1.0), (0.7, 0.9), (1.0, 1.0)]))
def test_any_tree_gives_the_text_of_plain_decoding(tree: DraftTree, seed: int, how: tuple[float, float]) -> None:
    own = TokenDraw(*how, seed=seed, place=0)
    assert speculative(own, lambda text: tree) == plain(own)


def test_a_drafter_that_is_right_or_always_wrong() -> None:
    own = TokenDraw(1.0, 1.0, seed=11, place=0)
    whole = plain(own)
    calls = list[int]()

    def right(text: list[int]) -> DraftTree:
        calls.append(len(text))
        return DraftTree.chain(whole[len(text) :][:3])

    def wrong(text: list[int]) -> DraftTree:
        return DraftTree.chain([(token + 1) % VOCABULARY for token in whole[len(text) :][:3]])

    assert speculative(own, right) == speculative(own, wrong) == whole
    assert len(calls) <= -(-len(whole) // 4)


def test_processors_are_run_on_the_text_of_each_node() -> None:
    """A penalty on what was said already depends on the tokens of the path."""

    def once(text: Sequence[int], row: Tensor) -> Tensor:
        row = row.clone()
        row[[token for token in set(text) if token != END]] = -30.0
        return row

    for seed in range(20):
        own = TokenDraw(0.8, 1.0, seed=seed, place=0)
        assert speculative(own, lambda text: DraftTree((0, 1, 2, 3), (0, 0, 1, 2)), once) == plain(own, once)


@pytest.mark.parametrize(
    ("tokens", "parents", "words"),
    [
        ((1,), (), "1 tokens was given 0 parents"),
        ((1, 2), (0, 2), "a parent comes before"),
        ((1, 1), (0, 0), "a second time"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        DraftTree(tokens, parents)
