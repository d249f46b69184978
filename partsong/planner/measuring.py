"""Measures on every rank at once how fast this machine computes and carries messages."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from partsong.accelerator import synchronize
from partsong.parallel.ranks.collectives import Pending, agree, exchange
from partsong.parallel.ranks.mesh import AXES, Mesh

__all__ = ["LINK_SIZES", "SMALL", "TOKENS", "measure", "probe_call", "probe_model"]

#: Bytes of the messages that are timed.
LINK_SIZES = (4096, 1 << 18, 1 << 22)
#: Image tokens of the steps that are timed.
TOKENS = (256, 1024, 2304)
#: Those of the step of a model so small that nearly all of it is the host's work.
SMALL = 16
#: Rows of the matrix products that are timed, against a square of `_SIDE`.
_ROWS = (64, 512, 4096)
_SIDE = 1024
#: Keys of the attentions that are timed, with 8 heads of 64 numbers.
_KEYS = (512, 2048)
#: Lengths of vectors that are added, from what a small cache holds to what no cache does.
_ADDED = tuple(1 << power for power in range(13, 25))
#: Width of the model whose steps are timed, and of the small one.
_WIDTHS = {False: 768, True: 32}
_REPEATS = 5
#: A measurement of one size stops after this many seconds, however few repeats it has.
_PATIENCE = 1.5


def measure(threads: int | None = None) -> dict[str, Any]:
    """Times operators, messages and one step of a denoiser; call it on every rank.

    Args:
        threads: of a rank; None is what torch takes by itself.

    Returns:
        Raw seconds, the same on every rank: means over ranks for what all compute at once, and those of the slowest
        rank for messages.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    world = Mesh(data=_world())
    with world as mesh, torch.no_grad():
        bench = _Bench(mesh)
        return {
            "ranks": mesh.world_size,
            "device": mesh.device.type,
            "threads": torch.get_num_threads(),
            "dispatch": bench.together(bench.tiny()),
            "matmul": {rows: bench.together(bench.matmul(rows)) for rows in _ROWS},
            "attention": {keys: bench.together(bench.attention(keys)) for keys in _KEYS},
            "memory": {numbers: bench.together(bench.addition(numbers)) for numbers in _ADDED},
            "small": bench.together(bench.step(SMALL, small=True)),
            "steps": {tokens: bench.together(bench.step(tokens)) for tokens in TOKENS},
            "alone": {tokens: bench.alone(bench.step(tokens)) for tokens in TOKENS},
            "messages": [] if mesh.world_size == 1 else bench.messages(),
            "overlap": None if mesh.world_size == 1 else bench.overlap(),
        }


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class _Bench:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.axis = mesh, mesh.axis(*AXES)
        self.dtype = torch.float32 if mesh.device.type == "cpu" else torch.bfloat16
        self.models: dict[bool, nn.Module] = {}

    def new(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.mesh.device)

    def tiny(self) -> Callable[[], Any]:
        one = self.new(8)
        return lambda: [one + one for _ in range(100)]

    def matmul(self, rows: int) -> Callable[[], Any]:
        left, right = self.new(rows, _SIDE), self.new(_SIDE, _SIDE)
        return lambda: left @ right

    def attention(self, keys: int) -> Callable[[], Any]:
        query = self.new(1, 8, keys, 64)
        return lambda: functional.scaled_dot_product_attention(query, query, query)

    def addition(self, numbers: int) -> Callable[[], Any]:
        one, other = self.new(numbers), self.new(numbers)
        return lambda: torch.add(one, other)

    def step(self, tokens: int, *, small: bool = False) -> Callable[[], Any]:
        if small not in self.models:
            self.models[small] = probe_model(small=small).to(self.mesh.device, self.dtype)
        call = probe_call(tokens, self.dtype, small=small)
        given = {name: value.to(self.mesh.device) for name, value in call.items()}
        model = self.models[small]
        return lambda: model(**given)

    def together(self, work: Callable[[], Any]) -> float:
        """Times work that every rank does by itself, all at once, in seconds."""
        for _ in range(2):
            work()
        agree(self.axis, [0.0])
        seconds = statistics.median(self._timed(work))
        return statistics.fmean(each[0] for each in agree(self.axis, [seconds]))

    def alone(self, work: Callable[[], Any]) -> float:
        """Times work that the first rank does while the others wait, in seconds."""
        agree(self.axis, [0.0])
        seconds = statistics.median(self._timed(work)) if self.axis.index == 0 else 0.0
        return agree(self.axis, [seconds])[0][0]

    def _timed(self, work: Callable[[], Any]) -> list[float]:
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _PATIENCE:
            start = time.perf_counter()
            work()
            synchronize(self.mesh.device)
            times.append(time.perf_counter() - start)
        return times

    def messages(self) -> list[dict[str, Any]]:
        """Times exchanges of each form and size, and between each pair of ranks."""
        me, size = self.axis.index, self.axis.size
        everyone = [peer for peer in range(size) if peer != me]
        after, before = (me + 1) % size, (me - 1) % size
        rows = []
        for number in LINK_SIZES:
            forms = {
                "all-to-all": (everyone, everyone),
                "ring": ([after], [before]),
                "one way": ([1] if me == 0 else [], [0] if me == 1 else []),
            }
            for form, (to, source) in forms.items():
                rows.append({"form": form, "bytes": number, "seconds": self._exchanged(number, to, source)})
        for one in range(size):
            for other in range(one + 1, size):
                peers = [other] if me == one else [one] if me == other else []
                seconds = [self._exchanged(number, peers, peers) for number in LINK_SIZES[::2]]
                rows.append({"form": "pair", "ranks": [one, other], "bytes": LINK_SIZES[::2], "seconds": seconds})
        return rows

    def _post(self, number: int, to: Sequence[int], source: Sequence[int]) -> Pending:
        sends = {peer: torch.zeros(number, dtype=torch.uint8, device=self.mesh.device) for peer in to}
        recvs = {peer: torch.empty(number, dtype=torch.uint8, device=self.mesh.device) for peer in source}
        return exchange(self.axis, sends, recvs, name="calibration")

    def _exchanged(self, number: int, to: Sequence[int], source: Sequence[int]) -> float:
        """Times one exchange; see `_slowest`."""
        return self._slowest(lambda: self._post(number, to, source).wait())

    def _slowest(self, work: Callable[[], Any]) -> float:
        """Times work in which ranks wait for each other, in seconds of the slowest rank."""
        seconds, spent = [], 0.0
        # All ranks repeat equally often: they have agreed on how long the one before took.
        while len(seconds) < _REPEATS and spent < _PATIENCE:
            agree(self.axis, [0.0])
            start = time.perf_counter()
            work()
            synchronize(self.mesh.device)
            slowest = max(each[0] for each in agree(self.axis, [time.perf_counter() - start]))
            seconds.append(slowest)
            spent += slowest
        return statistics.median(seconds)

    def overlap(self) -> dict[str, float]:
        """Times an exchange alone, products alone, and both at once."""
        me, size = self.axis.index, self.axis.size
        to, source = [(me + 1) % size], [(me - 1) % size]
        number, product = LINK_SIZES[-1], self.matmul(512)
        alone = self._exchanged(number, to, source)
        one = self.together(product)
        times = max(1, round(1.5 * alone / one))

        def both() -> None:
            pending = self._post(number, to, source)
            for _ in range(times):
                product()
            pending.wait()

        return {"message": alone, "products": one * times, "both": self._slowest(both)}


def probe_model(*, small: bool = False) -> nn.Module:
    """Builds a transformer whose steps are timed: blocks of both kinds of FLUX, 60 million random parameters.

    Args:
        small: with as many operators, but hardly any work in each.
    """
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    width = _WIDTHS[small]
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=width // 2 if small else 64,
        num_attention_heads=2 if small else 12,
        joint_attention_dim=width,
        pooled_projection_dim=width,
        axes_dims_rope=(4, 6, 6) if small else (16, 24, 24),
    ).eval()


def probe_call(tokens: int, dtype: torch.dtype, *, small: bool = False) -> dict[str, Tensor]:
    """Makes the arguments of its call for a number of image tokens."""
    width, texts = _WIDTHS[small], SMALL if small else 128
    return {
        "hidden_states": torch.zeros(1, tokens, 64, dtype=dtype),
        "encoder_hidden_states": torch.zeros(1, texts, width, dtype=dtype),
        "pooled_projections": torch.zeros(1, width, dtype=dtype),
        "timestep": torch.ones(1, dtype=dtype),
        "img_ids": torch.zeros(tokens, 3, dtype=dtype),
        "txt_ids": torch.zeros(texts, 3, dtype=dtype),
    }
