"""The stage `attention`: every backend, and merging, against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.evals.gpu.compared import TOLERANCE, distance, poisoned, widened
from partsong.evals.gpu.findings import Equipment, Finding, at_most, holds, skipped
from partsong.kernels import BlockCausal, Causal, Segment, attention, available, force_backend, merge
from partsong.kernels.backends.triton_attention import interpreted

__all__ = ["attention_kernels"]

#: Largest difference of a log-sum-exp, which every kernel keeps in float32.
LSE = 1e-3
FORMS = ("plain", "causal", "block causal", "padding", "bias", "init", "segments")


@dataclass(frozen=True)
class _Shape:
    """Is one call: heads, those of keys, queries, keys, numbers of a head, type and form."""

    dtype: torch.dtype = torch.bfloat16
    form: str = "plain"
    width: int = 64
    queries: int = 129
    keys: int = 129
    heads: int = 8
    kv_heads: int = 8
    batch: int = 2

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}/{self.kv_heads} heads"
        return f"{self.form} {kind}, {self.batch} x {heads} x {self.queries} x {self.keys}, D {self.width}"


def _shapes(equipment: Equipment) -> Iterator[_Shape]:
    """Yields those first that models use most."""
    if not equipment.gpus:
        for form in FORMS:
            yield _Shape(dtype=torch.float32, form=form, queries=17, keys=17, heads=4, kv_heads=2)
        return
    for length, heads in ((4608, 3), (2304, 8)):
        yield _Shape(width=128, queries=length, keys=length, heads=heads, kv_heads=heads, batch=1)
    for width in (128, 64, 160, 256, 40, 80):
        yield _Shape(width=width)
    for form in FORMS[1:]:
        for width in (64, 128):
            yield _Shape(form=form, width=width, kv_heads=2)
    for dtype in (torch.float16, torch.float32):
        for width in (64, 128, 160):
            yield _Shape(dtype=dtype, width=width)
        for form in FORMS[1:]:
            yield _Shape(dtype=dtype, form=form, kv_heads=2)
    for queries, keys in ((1, 129), (1, 2304), (17, 129), (129, 17), (1, 1)):
        yield _Shape(width=128, queries=queries, keys=keys, kv_heads=2)
    yield _Shape(heads=24, kv_heads=24, width=128, queries=333, keys=777)


def _arguments(shape: _Shape, device: str) -> dict[str, Any]:
    draw = torch.Generator(device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.randn(size, generator=draw, device=device).to(dtype)

    b, d = shape.batch, shape.width
    q = normal(b, shape.heads, shape.queries, d)
    k, v = (normal(b, shape.kv_heads, shape.keys, d) for _ in range(2))
    square = (1, 1, shape.queries, shape.keys)
    padding = torch.arange(shape.keys, device=device) < max(1, shape.keys - 5)
    padding = padding.repeat(b, 1)[:, None, None]
    padding[-1] = b == 1  # the last of several samples has nothing to attend to
    half = shape.keys // 2
    forms: dict[str, Any] = {
        "plain": {},
        "causal": {"mask": Causal()},
        "block causal": {"mask": BlockCausal(block=8)},
        "padding": {"mask": padding},
        "bias": {"bias": normal(*square, dtype=torch.float32)},
        "init": {"init": (normal(*q.shape, dtype=torch.float32), normal(*q.shape[:3], dtype=torch.float32))},
        "segments": {
            "segments": [
                Segment(k[:, :, :half], v[:, :, :half]),
                Segment(k[:, :, half:], v[:, :, half:], bias=math.log(3)),
            ]
        },
    }
    keys = {} if shape.form == "segments" else {"k": k, "v": v}
    return {"q": q, **keys, **forms[shape.form]}


def _wide(value: Any) -> Any:
    """Returns an argument with its numbers in float64."""
    if isinstance(value, Tensor):
        return widened(value)
    if isinstance(value, Segment):
        return replace(value, k=value.k.double(), v=value.v.double())
    return type(value)(map(_wide, value)) if isinstance(value, tuple | list) else value


@torch.inference_mode()
def attention_kernels(equipment: Equipment) -> Iterator[Finding]:
    """Compares every usable backend in every form, merging, and a result with an error that has to be seen."""
    fresh = _fresh(equipment)
    yield holds("fresh memory is poisoned", math.isnan(fresh), fresh, "nan")
    left_out = {"triton"} if interpreted() else {"flex"} if equipment.gpus else set()  # flex compiles for each shape
    names = [name for name, usable, _ in available() if usable and name not in left_out]
    yield from _merges(equipment)
    for shape in _shapes(equipment):
        given = _arguments(shape, equipment.device)
        with force_backend("naive"):
            want = attention(**{name: _wide(value) for name, value in given.items()})
        if shape == next(_shapes(equipment)):
            yield _planted(want)
        for name in names:
            yield from _compared(name, shape, given, want)


def _fresh(equipment: Equipment) -> float:
    with poisoned():
        return torch.empty(1, device=equipment.device).item()


def _compared(name: str, shape: _Shape, given: dict[str, Any], want: tuple[Tensor, Tensor]) -> Iterator[Finding]:
    check = f"{name}, {shape}"
    try:
        with force_backend(name), poisoned():
            out, lse = attention(**given)
    except UnsupportedError as refusal:
        yield skipped(check, str(refusal).rpartition(": ")[2])
        return
    except Exception as error:  # noqa: BLE001 - what a kernel raises is its result, and the others go on
        yield holds(check, False, f"{type(error).__name__}: {str(error).splitlines()[0]}", "no error")
        return
    yield at_most(check, distance([out], want[:1]), TOLERANCE[shape.dtype])
    yield at_most(f"{check}, log-sum-exp", distance([lse], want[1:]), LSE)


def _planted(want: tuple[Tensor, Tensor]) -> Finding:
    """Reports whether one wrong number among all is found."""
    wrong = want[0].clone()
    wrong.view(-1)[-1] += 0.1 * wrong.abs().amax()
    seen = at_most("", distance([wrong], want[:1]), max(TOLERANCE.values()))
    return holds("a planted error is reported", seen.ok is False, seen.value, "> 0.02")


def _merges(equipment: Equipment) -> Iterator[Finding]:
    draw = torch.Generator(equipment.device).manual_seed(1)
    heads, length, width = equipment.pick((24, 1025, 128), (2, 9, 8))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (2, 3, 8, 11):  # more than eight take two launches
            parts = []
            for _ in range(count):
                out = torch.randn(2, heads, length, width, generator=draw, device=equipment.device).to(dtype)
                lse = torch.randn(2, heads, length, generator=draw, device=equipment.device)
                lse[:, :, ::7] = -math.inf  # rows that no part has keys for
                parts.append((out, lse))
            with poisoned():
                got = merge(parts)
            want = merge([(out.double(), lse.double()) for out, lse in parts])
            kind = str(dtype).removeprefix("torch.")
            yield at_most(f"merge of {count}, {kind}", distance(got, want), TOLERANCE[dtype])
