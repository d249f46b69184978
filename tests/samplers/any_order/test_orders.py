"""Orders and sizes of groups: what the paper's rules say of them, counted."""

from __future__ import annotations

import numpy as np
import pytest

from partsong.errors import ArgumentError
from partsong.samplers.any_order import apart_order, group_sizes, parse_picture_rule, random_order, raster_order


@pytest.mark.parametrize(("num", "steps"), [(64, 64), (64, 33), (64, 12), (64, 8), (64, 1), (256, 20), (4, 3)])
def test_sizes_add_up_and_begin_small(num: int, steps: int) -> None:
    sizes = group_sizes(num, steps)
    assert len(sizes) == steps and sum(sizes) == num and min(sizes) >= 1
    assert sizes[0] == min(sizes)


def test_sizes_are_the_published_ones() -> None:
    """The paper's table for 256 tokens in 20 steps."""
    assert group_sizes(256, 20)[:7] == [1, 2, 4, 5, 7, 8, 10]


def test_members_of_a_group_lie_apart_and_beside_what_is_known() -> None:
    sizes = group_sizes(64, 12)
    near, gaps = {"apart": 0, "random": 0}, {"apart": 0, "random": 0}
    for seed in range(20):
        for name, order in (("apart", apart_order(8, sizes, seed)), ("random", random_order(8, seed))):
            assert sorted(order) == list(range(64))
            rows, columns = np.divmod(order, 8)
            first = 0
            for size in sizes:
                own = slice(first, first + size)
                far = np.maximum(abs(rows[own, None] - rows[None]), abs(columns[own, None] - columns[None]))
                gaps[name] += int((far[:, own] == 1).sum()) // 2
                near[name] += int((far[:, :first] == 1).any(1).sum())
                first += size
    assert gaps["apart"] < 0.5 * gaps["random"]
    assert near["apart"] > near["random"]


def test_orders_depend_on_the_seed_alone() -> None:
    sizes = group_sizes(64, 8)
    assert (apart_order(8, sizes, 3) == apart_order(8, sizes, 3)).all()
    assert (apart_order(8, sizes, 3) != apart_order(8, sizes, 4)).any()
    assert (random_order(8, 3) == random_order(8, 3)).all()
    assert raster_order(2).tolist() == [0, 1, 2, 3]


def test_refused() -> None:
    with pytest.raises(ArgumentError, match="0 steps for 64 tokens; use 1 to 64"):
        group_sizes(64, 0)
    with pytest.raises(ArgumentError, match="groups of 3 tokens in all, but the picture has 4"):
        apart_order(2, [1, 2], 0)
    with pytest.raises(ArgumentError, match="no rule for picture"):
        parse_picture_rule("sooner")
    with pytest.raises(ArgumentError, match="steps=0; use"):
        parse_picture_rule("lpd:steps=0")
