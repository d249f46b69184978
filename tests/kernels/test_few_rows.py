"""Products of a few rows against the plain ones, and the second tree of modules that computes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partsong.kernels import few_rows
from partsong.kernels.few_rows import FewRowsLinear, few_rows_product, with_few_rows


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("tokens", [6, 7, 1])
def test_a_product_is_the_plain_one(rows: int, tokens: int) -> None:
    x, weight = torch.randn(rows, 5).double(), torch.randn(tokens, 5).double()
    torch.testing.assert_close(few_rows_product(x, weight), x @ weight.T, rtol=0, atol=1e-14)
    assert few_rows_product(x, weight).is_contiguous()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1), (1, 3), (2, 2), (3, 4), (0, 2)])
def test_a_layer_is_the_plain_one(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(5, 6, bias=bias).double()
    x = torch.randn(*shape, 5).double()
    with torch.no_grad():
        torch.testing.assert_close(FewRowsLinear(linear)(x), linear(x), rtol=0, atol=1e-14)
        # A step of two rows arrives as a view whose rows do not lie together.
        wide = torch.randn(2, 7, 5).double()[:, -1:]
        torch.testing.assert_close(FewRowsLinear(linear)(wide), linear(wide), rtol=0, atol=1e-14)


def test_the_tree_shares_all_but_slow_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_LEAST", 20)
    shared, hooked = nn.Linear(4, 6), nn.Linear(4, 6)

    def double(module: Any, args: Any, out: Any) -> Any:
        return 2 * out

    hooked.register_forward_hook(double)
    small, odd, own = nn.Linear(4, 4), nn.Linear(4, 7), type("Own", (nn.Linear,), {})(4, 6)
    parts: list[nn.Module] = [shared, nn.Sequential(shared, nn.GELU()), hooked, small, odd, own, nn.LayerNorm(4)]
    module = nn.ModuleList(parts)
    tree: Any = with_few_rows(module)
    assert isinstance(tree[0], FewRowsLinear) and tree[1][0] is tree[0]
    assert [mine is theirs for mine, theirs in zip(tree, parts, strict=True)] == [False, False] + [True] * 5
    assert module[0] is shared and parts[1][0] is shared  # type: ignore[index]
    assert tree[0].weight.data_ptr() == shared.weight.data_ptr()
    # A weight of a type that gains nothing, and a module without any such layer.
    assert isinstance(with_few_rows(nn.Linear(4, 6).bfloat16()), nn.Linear)
    assert with_few_rows(parts[6]) is parts[6]


def test_hooks_of_the_user_see_the_second_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_LEAST", 1)
    module, seen = nn.Sequential(nn.Linear(4, 6)), list[int]()
    tree = with_few_rows(module)
    module.register_forward_hook(lambda *_: seen.append(1))
    tree(torch.ones(1, 4))
    assert seen == [1]
