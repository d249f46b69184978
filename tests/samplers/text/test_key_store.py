"""The store itself: where things are written, what comes back, and what is never seen."""

from __future__ import annotations

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.samplers.text.key_store import SlotKeyStore

ROWS, HEADS, SLOTS, WIDTH = 3, 2, 5, 4


def written(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1.0
    return keys, -keys


def test_slots_are_written_and_views_come_back() -> None:
    store = SlotKeyStore(layers=2, rows=ROWS, slots=SLOTS)
    new, _ = written(ROWS, HEADS, 2, WIDTH)
    slots = torch.tensor([[0, 4], [3, 1], [5, 2]])
    store.at(slots, None)
    keys, values = store.update(new, -new, 1)
    expected = torch.zeros(ROWS, HEADS, SLOTS, WIDTH)
    for row in range(ROWS):
        for token, slot in enumerate(slots[row].tolist()):
            if slot < SLOTS:
                expected[row, :, slot] = new[row, :, token]
    assert torch.equal(keys, expected) and torch.equal(values, -expected)
    again, _ = store.update(new, -new, 1)
    held = store.layers[1].keys
    assert held is not None and again.data_ptr() == keys.data_ptr() == held.data_ptr()
    assert not store.layers[0].is_initialized and held.shape[2] == SLOTS + 1


def test_some_rows_and_fewer_rows() -> None:
    store = SlotKeyStore(layers=1, rows=ROWS, slots=SLOTS)
    new, _ = written(ROWS, HEADS, SLOTS, WIDTH)
    everything = torch.arange(SLOTS).expand(ROWS, -1)
    store.at(everything, None)
    before = store.update(new, -new, 0)[0].clone()
    some = torch.tensor([2, 0])
    patch = torch.full((2, HEADS, 1, WIDTH), 9.0)
    store.at(torch.tensor([[1], [SLOTS]]), some)
    keys, _ = store.update(patch, patch, 0)
    assert (keys[0, :, 1] == 9.0).all() and torch.equal(keys[1], before[0])
    store.keep(torch.tensor([1, 2]))
    assert (store.rows, store.slots) == (2, SLOTS)
    store.at(torch.full((2, 1), SLOTS), None)
    kept, _ = store.update(patch, patch, 0)
    assert torch.equal(kept[0], before[1]) and torch.equal(kept[1], keys[0])


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_counts(count) -> None:
    with pytest.raises(ArgumentError, match="slots=.*; use a positive integer"):
        SlotKeyStore(layers=1, rows=1, slots=count)


def test_indices() -> None:
    store = SlotKeyStore(layers=1, rows=2, slots=3)
    with pytest.raises(ArgumentTypeError, match="slots as int64 with 2 dims, found torch.int32"):
        store.at(torch.zeros(2, 1, dtype=torch.int32), None)
    with pytest.raises(ArgumentTypeError, match="rows as int64 with 1 dims, found list"):
        store.at(torch.zeros(1, 1, dtype=torch.int64), [0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentTypeError, match="keep"):
        store.keep(torch.tensor([True, False]))
    with pytest.raises(ArgumentError, match="slots are given for 1 rows and 2 take part"):
        store.at(torch.zeros(1, 1, dtype=torch.int64), None)
