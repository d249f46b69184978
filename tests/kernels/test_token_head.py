"""The token head's statistics against a full float64 softmax; its memory, its shards, its refusals."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels import token_head
from partsong.kernels.no_token import ALL_FORBIDDEN, NOT_A_NUMBER
from partsong.kernels.token_head import ENV, TokenNoise, merge_token_states, token_state, token_stats
from tests.kernels.token_oracle import (
    TOLERANCE,
    check,
    forced,
    inputs,
    logits_of,
    on_each_twin,
    specification,
)

MASK = -math.inf


@pytest.fixture
def twin(request) -> Iterator[str]:
    with forced(request.param) as name:
        yield name


@on_each_twin
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "vocabulary", "width"), [(1, 1, 1), (3, 33, 5), (17, 257, 48), (64, 640, 96), ((2, 9), 700, 33)]
)
def test_statistics(twin, dtype, rows, vocabulary, width) -> None:
    hidden, weight = inputs(rows, vocabulary, width, dtype)
    stats = token_stats(hidden, weight)
    check(stats, logits_of(hidden, weight), TOLERANCE[dtype])
    assert torch.equal(stats.token, stats.argmax)
    assert stats.token.dtype is torch.int64
    assert stats.entropy.dtype is torch.float32
    assert stats.token.shape == hidden.shape[:-1]


@on_each_twin
@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"logit_scale": 0.3}, {"softcap": 2.0, "logit_scale": 1.7}])
@pytest.mark.parametrize("with_bias", [False, True])
def test_logit_options(twin, options, with_bias) -> None:
    hidden, weight = inputs(7, 130, 24)
    if with_bias:
        options = options | {"bias": torch.linspace(-3, 3, 260).cos()[::2]}
    check(token_stats(hidden, weight, **options), logits_of(hidden, weight, **options), TOLERANCE[torch.float32])


def test_float64_stays_float64() -> None:
    hidden, weight = inputs(5, 90, 12, torch.float64)
    stats = token_stats(hidden, weight, temperature=1.0, noise=3)
    check(stats, logits_of(hidden, weight), TOLERANCE[torch.float64])
    assert stats.lse.dtype is torch.float64


@on_each_twin
def test_bfloat16_is_computed_in_float32(twin) -> None:
    hidden, weight = inputs(5, 90, 40, torch.bfloat16)
    check(token_stats(hidden, weight), logits_of(hidden, weight), TOLERANCE[torch.float32])


@on_each_twin
def test_large_logits_keep_their_entropy(twin) -> None:
    # ln s + m - (sum x e^(x - m)) / s would subtract 3e4 from 3e4 here.
    x = torch.tensor([[3e4, 3e4 - 1, 3e4 - 3], [-3e4, -3e4, -3e4]])
    stats = token_stats(torch.eye(3)[:2], torch.cat([x, torch.zeros(1, 3)]).T.contiguous())
    expected = specification(x.double(), stats.token)
    assert torch.allclose(stats.entropy.double(), expected["entropy"], rtol=0, atol=1e-6)
    assert torch.allclose(stats.margin.double(), expected["margin"], rtol=0, atol=1e-6)


@on_each_twin
def test_ties_take_the_lowest_token(twin) -> None:
    hidden, weight = torch.zeros(2, 8), torch.zeros(300, 8)
    stats = token_stats(hidden, weight)
    assert stats.argmax.tolist() == stats.token.tolist() == [0, 0]
    assert stats.margin.tolist() == [0, 0]
    assert stats.entropy.tolist() == pytest.approx([math.log(300)] * 2, rel=1e-6)
    bias = torch.zeros(300)
    bias[[41, 170, 171, 299]] = 2.0
    assert token_stats(hidden, weight, bias=bias).argmax.tolist() == [41, 41]


@on_each_twin
def test_forbidden_tokens(twin) -> None:
    hidden, weight = inputs(6, 200, 16)
    bias = torch.zeros(200)
    bias[:150] = bias[160:] = MASK
    stats = token_stats(hidden, weight, bias=bias, temperature=2.0, noise=1)
    check(stats, logits_of(hidden, weight, bias), TOLERANCE[torch.float32])
    assert ((stats.token >= 150) & (stats.token < 160)).all()
    bias[150:159] = MASK
    stats = token_stats(hidden, weight, bias=bias, temperature=2.0, noise=1)
    assert stats.token.tolist() == stats.argmax.tolist() == [159] * 6
    assert stats.max_prob.tolist() == stats.margin.tolist() == stats.token_prob.tolist() == [1.0] * 6


@on_each_twin
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed(twin, temperature) -> None:
    hidden, weight = inputs(2, 100, 8)
    stats = token_stats(hidden, weight, bias=torch.full((100,), MASK), temperature=temperature, noise=1)
    assert stats.lse.tolist() == [MASK, MASK]
    assert stats.token.tolist() == [ALL_FORBIDDEN, ALL_FORBIDDEN]
    for name in ("argmax", "token_prob", "max_prob", "margin", "entropy"):
        assert getattr(stats, name).tolist() == [0, 0], name


@on_each_twin
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # which the interpreter notes, not the GPU
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_logits(twin, value) -> None:
    # One token that takes all: nobody's probability. One that cannot be, by overflow instead of by bias: it is 0.
    hidden, weight = torch.ones(1, 1), torch.zeros(40, 1)
    weight[7] = value
    stats = token_stats(hidden, weight)
    if value > 0:
        assert stats.argmax.item() == 7
        assert stats.token.item() == NOT_A_NUMBER
        assert stats.max_prob.isnan().all()
        assert stats.entropy.isnan().all()
    else:
        assert stats.max_prob.item() == pytest.approx(1 / 39)
        assert stats.entropy.item() == pytest.approx(math.log(39), rel=1e-6)
        assert stats.margin.item() == 0.0


def test_nan_is_no_token() -> None:
    hidden, weight = inputs(3, 50, 8)
    hidden[1] = math.nan
    state = merge_token_states(
        [
            token_state(hidden, part, temperature=1.0, noise=1, first_token=i * 25)
            for i, part in enumerate(weight.chunk(2))
        ]
    )
    stats = state.stats()
    assert stats.token[1] == NOT_A_NUMBER
    assert ((stats.argmax >= 0) & (stats.argmax < 50)).all()
    alone = TokenNoise(seed=1, positions=torch.tensor([0, 2]))
    assert torch.equal(stats.token[::2], token_stats(hidden[::2], weight, temperature=1.0, noise=alone).token)
    for name in ("token_prob", "max_prob", "entropy", "lse"):
        assert getattr(stats, name).isnan().tolist() == [False, True, False]


@on_each_twin
def test_positions(twin) -> None:
    hidden, weight = inputs((3, 5), 80, 16)
    noise = TokenNoise(seed=[4, 2**64 - 1, 6])
    whole = token_stats(hidden, weight, temperature=0.8, noise=noise)
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 1]], dtype=torch.bool)
    stats = token_stats(hidden, weight, mask, temperature=0.8, noise=noise)
    assert torch.equal(stats.token, whole.token[mask])
    assert torch.allclose(stats.lse, whole.lse[mask], rtol=1e-6)
    index = torch.tensor([14, 0, 7, 7, 3])
    stats = token_stats(hidden, weight, index.int(), temperature=0.8, noise=noise)
    assert torch.equal(stats.token, whole.token.flatten()[index])
    for none in (torch.zeros(3, 5, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)):
        stats = token_stats(hidden, weight, none, temperature=0.8, noise=noise)
        assert all(getattr(stats, field.name).shape == (0,) for field in dataclasses.fields(stats))


@on_each_twin
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_shards_merge_into_the_whole(twin, temperature) -> None:
    hidden, weight = inputs((2, 4), 500, 24)
    bias = torch.zeros(500)
    bias[100:333] = MASK  # the second shard has nothing to offer
    options = {"temperature": temperature, "noise": TokenNoise(seed=[1, 2]), "softcap": 8.0}
    whole = token_stats(hidden, weight, bias=bias, **options)
    cuts = [0, 97, 300, 301, 500]
    parts = [
        token_state(hidden, weight[a:b], bias=bias[a:b], first_token=a, **options) for a, b in itertools.pairwise(cuts)
    ]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        stats = merge_token_states([parts[i] for i in order]).stats()
        assert torch.equal(stats.token, whole.token)
        assert torch.equal(stats.argmax, whole.argmax)
        check(stats, logits_of(hidden, weight, bias, 8.0), TOLERANCE[torch.float32])
    nested = merge_token_states([merge_token_states(parts[:2]), merge_token_states(parts[2:])]).stats()
    assert torch.equal(nested.token, whole.token)


def test_ties_between_shards_take_the_lowest_token() -> None:
    hidden, weight = torch.zeros(2, 4), torch.zeros(10, 4)
    parts = [token_state(hidden, weight, first_token=first) for first in (20, 0, 10)]
    stats = merge_token_states(parts).stats()
    assert stats.argmax.tolist() == stats.token.tolist() == [0, 0]
    assert stats.margin.tolist() == [0, 0]
    assert stats.entropy.tolist() == pytest.approx([math.log(30)] * 2, rel=1e-6)


@on_each_twin
def test_strided_inputs_are_read_in_place(twin) -> None:
    hidden, weight = inputs(5, 70, 40)
    wide = torch.cat([weight, weight], 1)[:, :40]
    for h, w in ((hidden.T.contiguous().T, wide), (hidden, wide.T.contiguous().T)):
        check(token_stats(h, w), logits_of(hidden, weight), TOLERANCE[torch.float32])


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes of storages that come to life inside, on any device, meta as well."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.users: dict[int, int] = {}
        self.watched: dict[int, weakref.ref] = {}
        self.live = self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        born = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        for x in born:
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self.known:
                continue
            if key not in self.users:
                self.users[key] = 0
                self.live += size
                self.largest = max(self.largest, size)
            self.users[key] += 1
            watcher = weakref.ref(x, lambda watcher, key=key, size=size: self.release(watcher, key, size))
            self.watched[id(watcher)] = watcher
        self.peak = max(self.peak, self.live)
        return out

    def release(self, watcher: weakref.ref, key: int, size: int) -> None:
        del self.watched[id(watcher)]
        self.users[key] -= 1
        if not self.users[key]:
            del self.users[key]
            self.live -= size


@pytest.mark.parametrize(
    ("vocabulary", "temperature"), [pytest.param(126_464, 0.0, marks=pytest.mark.full), (10_000, 1.0)]
)
def test_memory_is_bounded(vocabulary, temperature) -> None:
    # 32 rows with 32 open positions each of 1024, LLaDA's vocabulary and width: the whole logits would be 16.6 GB.
    hidden = torch.empty(32, 1024, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(vocabulary, 4096, dtype=torch.bfloat16, device="meta")
    index = (torch.arange(32).view(-1, 1) * 1024 + torch.arange(32)).flatten()
    with LiveBytes(hidden, weight) as memory:
        stats = token_stats(hidden, weight, index, temperature=temperature, noise=TokenNoise(seed=list(range(32))))
    assert stats.token.shape == (1024,)
    assert memory.peak < 500e6
    assert memory.largest < 50e6


def test_no_gradient_flows() -> None:
    hidden, weight = inputs(2, 10, 4)
    assert not token_stats(hidden.requires_grad_(), weight).lse.requires_grad


def test_autocast_does_not_round() -> None:
    hidden, weight = inputs(4, 60, 16)
    with torch.autocast("cpu", torch.bfloat16):
        check(token_stats(hidden, weight), logits_of(hidden, weight), TOLERANCE[torch.float32])


def test_the_choice_is_logged_with_its_reason(monkeypatch, caplog) -> None:
    monkeypatch.delenv(ENV, raising=False)
    token_head._log_once.cache_clear()
    with caplog.at_level(logging.DEBUG, "partsong.kernels"):
        token_stats(*inputs(2, 10, 4))
        token_stats(*inputs(3, 10, 4))
    assert caplog.messages == ["token head naive used: the tensors are on cpu"]


@pytest.mark.full
def test_importing_the_kernels_does_not_import_triton() -> None:
    code = (
        "import sys, torch; before = 'triton' in sys.modules; import partsong.kernels.token_head\n"
        "print(before or 'triton' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "True\n"


HIDDEN, WEIGHT = torch.zeros(2, 3, 4), torch.zeros(5, 4)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"hidden": None}, ArgumentTypeError, "hidden to be a tensor, found NoneType"),
        ({"hidden": torch.zeros(4)}, ArgumentError, r"found hidden \(4,\), weight \(5, 4\)"),
        ({"weight": torch.zeros(4, 5)}, ArgumentError, r"found hidden \(2, 3, 4\), weight \(4, 5\)"),
        ({"weight": torch.zeros(0, 4)}, ArgumentError, "V and C at least 1"),
        ({"weight": WEIGHT.double()}, ArgumentError, "one dtype"),
        ({"hidden": HIDDEN.int(), "weight": WEIGHT.int()}, ArgumentError, "one dtype"),
        ({"weight": WEIGHT.to("meta")}, ArgumentError, "weight is on meta"),
        ({"bias": torch.zeros(4)}, ArgumentError, r"bias \[V\] = \[5\], found \(4,\)"),
        ({"bias": torch.zeros(5).int()}, ArgumentTypeError, "float bias"),
        ({"bias": [0.0] * 5}, ArgumentTypeError, "bias to be a tensor"),
        ({"bias": torch.zeros(5, device="meta")}, ArgumentError, "bias is on meta"),
        ({"positions": torch.ones(2, 4, dtype=torch.bool)}, ArgumentError, r"\(2, 3\); found \(2, 4\)"),
        ({"positions": torch.zeros(2, 2, dtype=torch.int64)}, ArgumentError, r"are \[M\].*found \(2, 2\)"),
        ({"positions": torch.tensor([0, 6])}, ArgumentError, "0 <= index < 6 rows; found 0 to 6"),
        ({"positions": torch.tensor([-1])}, ArgumentError, "found -1 to -1"),
        ({"positions": torch.zeros(2, 3)}, ArgumentTypeError, "float32"),
        ({"positions": [0, 1]}, ArgumentTypeError, "list"),
        ({"positions": torch.ones(6, dtype=torch.uint8)}, ArgumentTypeError, "uint8"),
        ({"softcap": 0.0}, ArgumentError, "softcap above 0; found 0.0"),
        ({"softcap": "30"}, ArgumentTypeError, None),
        ({"logit_scale": math.inf}, ArgumentError, "logit_scale"),
        ({"logit_scale": None}, ArgumentTypeError, "logit_scale to be a number, found None"),
        ({"temperature": -1.0}, ArgumentError, "temperature of at least 1e-06, or 0"),
        ({"temperature": math.nan}, ArgumentError, "temperature"),
        ({"temperature": 1e-9, "noise": 1}, ArgumentError, "temperature"),
        ({"temperature": 1.0}, ArgumentError, "needs noise="),
        ({"temperature": 1.0, "noise": 1}, ArgumentError, "one seed for 2 samples"),
        ({"temperature": 1.0, "noise": "1"}, ArgumentTypeError, "a seed is an int"),
        ({"temperature": 1.0, "noise": TokenNoise(seed=[1, 2, 3])}, ArgumentError, "3 seeds but hidden has 2 samples"),
        ({"temperature": 1.0, "noise": TokenNoise(seed=[1, -2])}, ArgumentError, "0 <= seed"),
        (
            {"temperature": 1.0, "noise": TokenNoise(seed=1, positions=torch.zeros(3, 2, dtype=torch.int64))},
            ArgumentError,
            r"int64 \(2, 3\).*found torch.int64 \(3, 2\)",
        ),
        ({"temperature": 1.0, "noise": TokenNoise(seed=1, positions=torch.zeros(2, 3))}, ArgumentError, "float32"),
        ({"temperature": 1.0, "noise": TokenNoise(seed=1, positions=[0])}, ArgumentError, "found list"),
    ],
)
def test_refusals(change, error, text) -> None:
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "positions": None} | change
    with pytest.raises(error, match=text):
        token_stats(arguments.pop("hidden"), arguments.pop("weight"), arguments.pop("positions"), **arguments)


def test_refusals_of_states(monkeypatch) -> None:
    for first in (-1, 1 << 30, 0.5, True):
        with pytest.raises(ArgumentError, match="first_token"):
            token_state(HIDDEN, WEIGHT, first_token=first)
    state = token_state(HIDDEN, WEIGHT)
    with pytest.raises(ArgumentError, match="at least one"):
        merge_token_states([])
    with pytest.raises(ArgumentTypeError, match="part 1 is a TokenStats"):
        merge_token_states([state, state.stats()])
    with pytest.raises(ArgumentError, match=r"part 1 has \(3, 4\), part 0 has \(2, 3\)"):
        merge_token_states([state, token_state(torch.zeros(3, 4, 4), WEIGHT)])
    monkeypatch.setenv(ENV, "cuda")
    with pytest.raises(ArgumentError, match="auto, naive or triton, found 'cuda'"):
        token_stats(HIDDEN, WEIGHT)
