"""What `attention` refuses, and which backend it takes."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.kernels import BlockCausal, Causal, Segment, Streams, Tree, attention, available, dispatch, force_backend
from partsong.kernels.call import Call
from tests.kernels.oracle import TOLERANCE, difference, inputs, oracle

USABLE = {name for name, ok, _ in available() if ok}


def chosen(q, k, v) -> str:
    choice = dispatch.choose(Call(q, (Segment(k, v, position=0),), None, None, 1.0))
    assert choice is not None
    return choice[0].name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 3, 5, 8), "v": (2, 3, 5, 8)}, "4 query heads and 3 key heads"),
        ({"k": (2, 0, 5, 8), "v": (2, 0, 5, 8)}, "0 key heads"),
        ({"k": (1, 4, 5, 8), "v": (1, 4, 5, 8)}, "batch"),
        ({"v": (2, 4, 6, 8)}, "one shape"),
        ({"v": (2, 4, 5, 9)}, "one shape"),
        ({"q": (2, 4, 8)}, r"\[B, Hq, Lq, D\]"),
        ({"mask": torch.ones(2, 5).bool()}, r"\[B, 1, 1, Lk\]"),
        ({"mask": torch.ones(2, 3, 5).bool()}, r"\[B, 1, Lq, Lk\]"),
        ({"bias": torch.ones(5)}, "broadcast"),
        ({"scale": math.nan}, "finite scale"),
        ({"segments": []}, "either as k, v or as segments"),
        ({"init": (torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2))}, r"init needs out \(2, 4, 3, 8\)"),
        ({"mask": BlockCausal(0)}, "block.*at least 1, found 0"),
        ({"mask": BlockCausal(2, offset=-1)}, "offset.*at least 0"),
        ({"mask": Causal(offset=True)}, "offset"),
        ({"mask": Streams(torch.zeros(4).long(), torch.zeros(5).long())}, r"query \(4,\) is neither \[3\] nor"),
        ({"mask": Streams(torch.zeros(3).long())}, "key ids"),
        ({"mask": Tree(torch.zeros(3).long(), torch.zeros(5).long(), torch.zeros(4).long())}, "leave"),
    ],
)
def test_refusals(change, message) -> None:
    shapes = {"q": (2, 4, 3, 8), "k": (2, 4, 5, 8), "v": (2, 4, 5, 8)}
    options = {name: value for name, value in change.items() if name not in shapes}
    tensors = {name: torch.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    with pytest.raises(ArgumentError, match=message):
        attention(**tensors, **options)


@pytest.mark.parametrize(
    ("segment", "options", "message"),
    [
        ({"bias": math.nan}, {}, "finite or -inf, found nan"),
        ({"stream": -2}, {}, "stream >= 0"),
        ({"stream": 1}, {}, "Streams mask"),
        ({"stream": 1}, {"mask": Streams(torch.zeros(3).long(), torch.zeros(5).long())}, "one of the two"),
        ({"position": -3}, {"mask": BlockCausal(2)}, "at least 0"),
        ({"k": torch.zeros(2, 3, 5, 8), "v": torch.zeros(2, 3, 5, 8)}, {}, "segment 0: .*4 query heads and 3"),
    ],
)
def test_refused_segments(segment, options, message) -> None:
    x = torch.zeros(2, 4, 5, 8)
    with pytest.raises(ArgumentError, match=message):
        attention(torch.zeros(2, 4, 3, 8), segments=[Segment(**{"k": x, "v": x, **segment})], **options)


def test_refused_types() -> None:
    q, k, v = inputs(1, 1, 1, 2, 3, 4)
    for bad in (
        {"mask": torch.ones(2, 3)},
        {"bias": torch.ones(2, 3).bool()},
        {"mask": True},
        {"init": [q]},
        {"mask": Causal},
    ):
        with pytest.raises(ArgumentTypeError):
            attention(q, k, v, **bad)
    with pytest.raises(ArgumentTypeError, match="number 0 is int"):
        attention(q, segments=[3])
    with pytest.raises(ArgumentTypeError, match="int32 or int64"):
        attention(q, k, v, mask=Streams(torch.zeros(2), torch.zeros(3).long()))
    with pytest.raises(ArgumentTypeError, match="tensor"):
        attention([1], k, v)
    with pytest.raises(ArgumentError, match="one dtype"):
        attention(q.float(), k, v)
    with pytest.raises(ArgumentError, match="one dtype"):
        attention(q.long(), k.long(), v.long())
    with pytest.raises(ArgumentError, match="one device"):
        attention(q.to("meta"), k, v)
    with pytest.raises(ArgumentError, match="init is on meta"):
        attention(q, k, v, init=[x.to("meta") for x in attention(q, k, v)])


def in_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What a program finds that starts with this environment, which is read once."""
    monkeypatch.setattr(dispatch, "_from_environment", lambda: name)


def test_the_environment_is_read(monkeypatch) -> None:
    monkeypatch.setenv(dispatch.ENV, "naive")
    assert dispatch._from_environment.__wrapped__() == "naive"


def test_forcing(monkeypatch) -> None:
    q, k, v = inputs(1, 1, 1, 2, 3, 4)
    with force_backend("efficient"), pytest.raises(UnsupportedError, match=r"efficient.*cpu, not cuda"):
        attention(q, k, v)
    with pytest.raises(ArgumentError, match="cpu_flash"), force_backend("fast"):
        pass
    in_environment(monkeypatch, "flash")
    with pytest.raises(UnsupportedError):
        attention(q, k, v)
    with force_backend("naive"):
        assert chosen(q, k, v) == "naive"
    with force_backend("auto"):
        assert chosen(q, k, v) == "cpu_flash"
    in_environment(monkeypatch, "nonsense")
    with pytest.raises(ArgumentError, match="nonsense"):
        attention(q, k, v)
    in_environment(monkeypatch, "naive")
    assert chosen(q, k, v) == "naive"


def test_forcing_ends_with_the_block_and_stays_in_its_thread() -> None:
    q, k, v = inputs(1, 1, 1, 2, 3, 4)
    seen = []
    with force_backend("naive"):
        thread = threading.Thread(target=lambda: seen.append(chosen(q, k, v)))
        thread.start()
        thread.join()
    assert seen == ["cpu_flash"]
    assert chosen(q, k, v) == "cpu_flash"


def test_choice_is_logged_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    q, k, v = inputs(1, 1, 1, 2, 3, 4)
    q.requires_grad_()
    with caplog.at_level(logging.DEBUG, logger="partsong.kernels"):
        for _ in range(3):
            attention(q, k, v)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "cpu_flash not used: an input requires a gradient" in messages[0]
    assert "naive used" in messages[1]


def test_available() -> None:
    rows = available()
    assert [name for name, _, _ in rows] == list(dispatch.BACKENDS)
    assert len(rows) == 11
    assert all(reason for _, _, reason in rows)
    assert {"cpu_flash", "naive"} <= USABLE


class OutOfResources(Exception):
    """Triton's error where a tile does not fit the GPU."""


def test_a_kernel_that_does_not_fit_the_gpu_leaves_the_call_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.Size] = []

    def too_large(call: Call) -> Any:
        tried.append(call.q.shape)
        raise OutOfResources("shared memory, Required: 106496, Hardware limit: 101376")

    row = dispatch.Backend(name="triton", usable=lambda: (True, ""), supports=lambda call: (True, ""), run=too_large)
    monkeypatch.setitem(dispatch._BY_DEVICE, "cpu", (row, *dispatch._BY_DEVICE["cpu"]))
    monkeypatch.setattr(dispatch, "_too_large", {})
    q, k, v = inputs(1, 2, 2, 5, 7, 16)
    for _ in range(2):
        assert difference(attention(q, k, v), oracle(q, k, v)) <= TOLERANCE[q.dtype]
    assert len(tried) == 1  # it is remembered
    monkeypatch.setitem(dispatch.BACKENDS, "triton", row)
    with force_backend("triton"), pytest.raises(UnsupportedError, match="106496"):
        attention(q, k, v)
