"""The tree of shared prompts: what it spells, what it keeps, and that cutting copies nothing."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from partsong.reasoning.local.prefix_node import PrefixNode
from partsong.reasoning.local.prefix_tree import PrefixTree, common_length


def room(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 1, tokens, 3), torch.zeros(2, 1, tokens, 3)


def fill(node: PrefixNode) -> None:
    """Writes the tokens themselves as keys, so that what lies where can be read back."""
    for each in node.chain():
        assert each.keys is not None
        if not each.complete:
            each.keys[:] = torch.tensor(each.tokens, dtype=torch.float32)[None, None, :, None]
            each.done = len(each.tokens)


def spelled(node: PrefixNode) -> list[int]:
    keys = [each.keys for each in node.chain()]
    return torch.cat([key[0, 0, :, 0] for key in keys if key is not None]).int().tolist()


def test_chains_spell_their_sequences_however_they_are_cut() -> None:
    draw = random.Random(0)
    tree = PrefixTree(room, limit=10**9)
    seen: dict[tuple[int, ...], PrefixNode] = {}
    for _ in range(120):
        base = list(draw.choice(list(seen))) if seen and draw.random() < 0.8 else []
        tokens = base[: draw.randint(0, len(base))] + [draw.randint(0, 5) for _ in range(draw.randint(1, 40))]
        node, found = tree.place(tokens)
        best = max((common_length(other, tokens) for other in seen), default=0)
        assert found <= best
        # A run of 16 shared tokens is always found again; a shorter end may not be worth a cut.
        assert found > best - 16 or node.start == found == 0
        fill(node)
        seen[tuple(tokens)] = node
    for tokens, node in seen.items():
        assert [token for each in node.chain() for token in each.tokens] == list(tokens) == spelled(node)
        assert node.end == len(tokens)
    assert tree.tokens == sum(len(node.tokens) for node in tree.nodes()) < sum(map(len, seen))


def test_a_cut_makes_views() -> None:
    tree = PrefixTree(room, limit=1000)
    node, _ = tree.place(list(range(50)))
    assert node.keys is not None
    memory = node.keys.untyped_storage().data_ptr()
    fill(node)
    other, found = tree.place([*range(30), 99])
    assert found == 30 and other.parent is node.parent
    assert [each.keys.untyped_storage().data_ptr() == memory for each in node.chain() if each.keys is not None] == [
        True,
        True,
    ]
    assert spelled(node) == list(range(50))


def test_a_half_computed_node_is_cut_into_what_is_done_and_what_is_not() -> None:
    tree = PrefixTree(room, limit=1000)
    node, _ = tree.place(list(range(60)))
    node.done = 40
    tree.place([*range(20), 99])
    assert [(len(each.tokens), each.done) for each in node.chain()] == [(20, 20), (40, 20)]
    tree.cut(node, 30)
    assert [(len(each.tokens), each.done) for each in node.chain()] == [(20, 20), (30, 20), (10, 0)]


def test_the_longest_unused_goes_first_and_what_is_used_stays() -> None:
    tree = PrefixTree(room, limit=100)
    nodes = [tree.place([index] * 40)[0] for index in range(4)]
    nodes[0].users = 1
    tree.place([1] * 40)
    tree.trim()
    assert [node.keys is None for node in nodes] == [False, False, True, True]
    assert tree.tokens == 80


def test_what_others_go_on_from_is_not_dropped() -> None:
    tree = PrefixTree(room, limit=0)
    first, _ = tree.place([1] * 20)
    second, _ = tree.place([1] * 20 + [2] * 5)
    second.users = 1
    tree.trim()
    assert first.keys is not None and tree.tokens == 25
    second.users = 0
    tree.trim()
    assert tree.tokens == 0 and not list(tree.nodes())
