"""Attention to chosen blocks of keys, against softmax written out, on every backend that this machine has."""

from __future__ import annotations

import importlib

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.kernels import Causal, ChosenBlocks, Segment, attention, force_backend
from partsong.kernels.backends import chosen_blocks, flex
from partsong.kernels.call import Call
from tests.kernels.oracle import TOLERANCE, difference, inputs, oracle


def choice(*shape: int, share: float = 0.4) -> torch.Tensor:
    """ChosenBlocks chosen at random; some rows of blocks see nothing, and some everything."""
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < share
    chosen[..., 0, :] = False
    chosen[..., -1, :] = True
    return chosen


def written_out(chosen: torch.Tensor, size: int, queries: int, keys: int) -> torch.Tensor:
    return chosen.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :queries, :keys]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.mark.parametrize("backend", ["auto", "blocks", "naive", "cpu_flash", "flex"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(2, 4, 2, 32, 24, 16), (1, 3, 3, 16, 40, 5)])
@pytest.mark.parametrize("alike", [False, True])
def test_equals_softmax(uncompiled, backend, dtype, shape, alike, monkeypatch) -> None:
    monkeypatch.setattr(chosen_blocks, "MAX_GATHERED", 300)  # so that a count takes several turns
    batch, heads, _, queries, keys, _ = shape
    q, k, v = inputs(*shape, dtype=dtype)
    chosen = choice(*((1, 1) if alike else (batch, heads)), queries // 8, keys // 8)
    init = oracle(q, k.flip(2), v)
    init = init[0].to(dtype), init[1].to(torch.float64 if dtype is torch.float64 else torch.float32)
    dense = written_out(chosen, 8, queries, keys)
    with force_backend(backend):
        found = attention(q, k, v, mask=ChosenBlocks(chosen, 8), scale=0.3)
        onto = attention(q, k, v, mask=ChosenBlocks(chosen, 8), init=init)
    assert difference(found, oracle(q, k, v, mask=dense, scale=0.3)) <= TOLERANCE[dtype]
    every = torch.cat([torch.ones_like(dense), dense], dim=-1)
    both = oracle(q, torch.cat([k.flip(2), k], 2), torch.cat([v, v], 2), mask=every)
    assert difference(onto, both) <= 2 * TOLERANCE[dtype]
    assert (found[0][found[1].isinf()] == 0).all() and found[1][:, :, :8].isinf().all()


@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_last_blocks_may_be_short(uncompiled, backend) -> None:
    q, k, v = inputs(1, 2, 2, 19, 27, 8)
    chosen = choice(1, 2, 3, 4)
    with force_backend(backend):
        found = attention(q, k, v, mask=ChosenBlocks(chosen, 8))
    assert difference(found, oracle(q, k, v, mask=written_out(chosen, 8, 19, 27))) <= TOLERANCE[torch.float64]


def test_a_second_mask_must_allow_a_key_too() -> None:
    q, k, v = inputs(1, 2, 2, 16, 16, 8)
    chosen, keep = choice(1, 2, 2, 2), torch.rand((1, 16), generator=torch.Generator().manual_seed(1)) < 0.5
    found = attention(q, k, v, mask=(ChosenBlocks(chosen, 8), keep))
    assert difference(found, oracle(q, k, v, mask=written_out(chosen, 8, 16, 16) & keep)) <= TOLERANCE[torch.float64]


def test_only_chosen_blocks_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 3, 3, 32, 32, 8)
    chosen, made = choice(2, 3, 4, 4), []
    inner = chosen_blocks.cpu_flash.run

    def counted(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(call.q.shape[0] * call.q.shape[2] * call.num_keys)
        return inner(call)

    monkeypatch.setattr(chosen_blocks.cpu_flash, "run", counted)
    attention(q, k, v, mask=ChosenBlocks(chosen, 8))
    assert sum(made) == int(chosen.sum()) * 8 * 8


@pytest.mark.parametrize(("size", "side"), [(64, 64), (128, None), (256, None), (96, 32), (48, 16)])
def test_tiles_of_a_gpu_fit_into_blocks(size: int, side: int | None) -> None:
    found = flex._kernel_options(ChosenBlocks(torch.ones(1, 1, 1, 1, dtype=torch.bool), size))
    assert found == (None if side is None else {"BLOCK_M": side, "BLOCK_N": side})


def test_without_values_it_gives_shapes() -> None:
    q, k, v = (x.to("meta") for x in inputs(1, 2, 1, 16, 24, 8))
    out, lse = attention(q, k, v, mask=ChosenBlocks(torch.ones(1, 2, 2, 3, dtype=torch.bool, device="meta"), 8))
    assert out.shape == q.shape and lse.shape == q.shape[:3] and out.is_meta


@pytest.mark.parametrize(
    ("chosen", "size", "error", "words"),
    [
        (torch.ones(1, 1, 2, 2), 8, ArgumentTypeError, "bool tensor of 4 dims, found a tensor of torch.float32"),
        (
            torch.ones(1, 1, 2, 3, dtype=torch.bool),
            8,
            ArgumentError,
            r"\(1, 1, 2, 3\) is not .* 2, 2\], the blocks",
        ),
        (torch.ones(1, 3, 2, 2, dtype=torch.bool), 8, ArgumentError, "for 3 heads and there are 2"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta"), 8, ArgumentError, "on meta but q is on cpu"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool), 0, ArgumentError, "at least 1, found 0"),
    ],
)
def test_bad_input(chosen, size, error, words) -> None:
    q, k, v = inputs(1, 2, 2, 16, 16, 8)
    with pytest.raises(error, match=words):
        attention(q, k, v, mask=ChosenBlocks(chosen, size))


def test_refusals() -> None:
    q, k, v = inputs(1, 2, 2, 16, 16, 8)
    mask = ChosenBlocks(torch.ones(1, 1, 2, 2, dtype=torch.bool), 8)
    with pytest.raises(ArgumentError, match="not in segments"):
        attention(q, segments=[Segment(k, v)], mask=mask)
    with force_backend("blocks"), pytest.raises(UnsupportedError, match="masks of chosen blocks"):
        attention(q, k, v, mask=Causal())
    with force_backend("blocks"), pytest.raises(UnsupportedError, match="no bias"):
        attention(q, k, v, mask=mask, bias=torch.zeros((1, 16), dtype=torch.float64))
