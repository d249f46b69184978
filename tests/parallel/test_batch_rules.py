"""Arguments of every kind are cut with the batch, shared by it, or refused by name; none is passed on in hope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.ranks.shards import offsets, split_sizes
from tests import covering

RULES = BatchRules(
    model="Model",
    batched=("sample", "text", "more"),
    per_sample=("pictures",),
    first=("sizes",),
    numbered={"spans": "given"},
    folded=("frames",),
    shared=("positions",),
)
NAMES = ("text", "more", "pictures", "frames", "positions", "unknown", "also_unknown")


def tensors(batch: int) -> st.SearchStrategy[Tensor]:
    """Tensors with 1, B, 2B or 3B rows, or another number of them, or none at all."""
    rows = st.sampled_from([None, 1, batch, 2 * batch, 3 * batch, batch + 1])
    fill = st.integers(1, 999)
    return st.builds(
        lambda n, seed: torch.arange(n or 1, dtype=torch.float64).add(seed).view(() if n is None else (n, 1)),
        rows,
        fill,
    )


def nested(batch: int) -> st.SearchStrategy[Any]:
    leaves = st.one_of(st.none(), st.integers(0, 9), tensors(batch))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            st.tuples(inner, inner),
        ),
        max_leaves=4,
    )


@st.composite
def calls(draw: Any) -> tuple[int, dict[str, Any]]:
    batch = draw(st.integers(2, 4))
    named = {name: draw(nested(batch)) for name in draw(st.sets(st.sampled_from(NAMES), max_size=3))}
    if "frames" in named:
        named["frames"] = draw(tensors(batch))
    return batch, {"sample": torch.arange(batch, dtype=torch.float64).view(batch, 1), **named}


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*place, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, (*place, index))
    else:
        yield place, value


def belongs_to_samples(name: str, leaf: Any, batch: int) -> bool:
    """Whether a model might read rows of it sample by sample."""
    return name not in RULES.shared and isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) % batch == 0


def serial(batch: int, named: dict[str, Any]) -> Tensor:
    """A model to which every argument matters: what has rows for the samples to each, the rest to all."""
    out = torch.zeros(batch, dtype=torch.float64)
    for name, value in named.items():
        if name == "pictures" and isinstance(value, (list, tuple)) and len(value) == batch:
            out += torch.stack(
                [
                    sum((torch.as_tensor(x).double().sum() for _, x in leaves(item) if x is not None), torch.zeros(()))
                    for item in value
                ]
            )
            continue
        for place, leaf in leaves(value):
            if belongs_to_samples(name, leaf, batch):
                out += leaf.reshape(batch, -1).sum(1) * (1 + len(place))
            elif leaf is not None:
                out += torch.as_tensor(leaf).double().sum()
    return out


def local(rows: slice, batch: int, whole: dict[str, Any], named: dict[str, Any]) -> Tensor:
    """The same model on some of the samples; what an argument means is known from the whole call."""
    size = rows.stop - rows.start
    out = torch.zeros(size, dtype=torch.float64)
    for name, value in named.items():
        given_whole = whole[name]
        if name == "pictures" and isinstance(given_whole, (list, tuple)) and len(given_whole) == batch:
            assert len(value) == size
            out += torch.stack(
                [
                    sum((torch.as_tensor(x).double().sum() for _, x in leaves(item) if x is not None), torch.zeros(()))
                    for item in value
                ]
            )
            continue
        before = dict(leaves(given_whole))
        for place, leaf in leaves(value):
            if belongs_to_samples(name, before[place], batch):
                out += leaf.reshape(size, -1).sum(1) * (1 + len(place))
            elif leaf is not None:
                out += torch.as_tensor(leaf).double().sum()
    return out


@given(calls(), st.integers(2, 3))
@settings(max_examples=400 if covering.FULL else 120, deadline=None)
def test_any_call_is_right_or_refused_by_name(call: tuple[int, dict[str, Any]], ranks: int) -> None:
    batch, named = call
    sizes = split_sizes(batch, ranks)
    parts = []
    for start, size in zip(offsets(sizes), sizes, strict=True):
        rows = slice(start, start + size)
        try:
            own = RULES.cut(named, rows, batch)
        except UnsupportedError as problem:
            assert any(name in str(problem) for name in named)  # noqa: PT017 - one of two legal outcomes
            return
        parts += [local(rows, batch, named, own)] if size else []
    assert torch.equal(torch.cat(parts), serial(batch, named))


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_what_may_belong_to_samples_is_not_passed_on(rows: int) -> None:
    for value in (torch.zeros(rows, 3), [torch.zeros(rows, 3)], {"a": (torch.zeros(rows, 3),)}, list(range(rows))):
        with pytest.raises(UnsupportedError, match="unknown"):
            RULES.cut({"unknown": value}, slice(0, 1), 2)


def test_lists_of_adapters_are_no_lists_of_samples() -> None:
    embeddings = [torch.arange(2.0), torch.arange(2.0) + 5]
    own = RULES.cut({"more": {"image_embeds": embeddings}}, slice(1, 2), 2)["more"]["image_embeds"]
    assert [part.tolist() for part in own] == [[1.0], [6.0]]


def test_the_first_item_of_a_list_serves_every_sample() -> None:
    for sizes in ([[(1, 4, 4)]], [[(1, 4, 4)]] * 2, [[(1, 4, 4)]] * 4):
        assert RULES.cut({"sizes": sizes}, slice(2, 4), 4)["sizes"] == [[(1, 4, 4)]]
    with pytest.raises(UnsupportedError, match="sizes differs between samples"):
        RULES.cut({"sizes": [[(1, 4, 4)], [(1, 2, 8)]]}, slice(0, 1), 2)


@pytest.mark.parametrize(
    ("rows", "spans", "listed"),
    [
        (slice(0, 1), {}, []),
        (slice(1, 3), {0: [(0, 2), (3, 5)]}, ["a", "b"]),
        (slice(2, 4), {1: [(1, 3)]}, ["c"]),
        ([3, 1], {0: [(1, 3)], 1: [(0, 2), (3, 5)]}, ["c", "a", "b"]),
    ],
)
def test_things_counted_by_sample_follow_their_sample(rows: Any, spans: Any, listed: list[str]) -> None:
    whole = {"spans": {1: [(0, 2), (3, 5)], 3: [(1, 3)]}, "given": ["a", "b", "c"]}
    own = RULES.cut(whole, rows, 4)
    assert (own["spans"], own["given"]) == (spans, listed)
