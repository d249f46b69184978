"""The stage `speeds`: attention, merging and compressed messages at the sizes of Flux at 1024 by 1024 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partsong.evals.bench.kernels import forced, timed
from partsong.evals.gpu.findings import Equipment, Finding, at_least, at_most
from partsong.kernels import available, merge
from partsong.kernels.backends.triton_attention import interpreted
from partsong.parallel.exchange.wires import WIRES, Wire

__all__ = ["speeds"]

REPEATS = 9
#: TFLOP/s of attention over 4608 tokens with 24 heads of 128 numbers that a GPU has to reach, by a part of its name.
_HOPPER = {"cudnn": 450.0, "flash": 300.0, "triton": 300.0}
TFLOPS = {"H100": _HOPPER, "H200": _HOPPER}
#: Tokens of queries and keys: all of them on one rank, and the half of two.
TOKENS = (4608, 2304)
#: Sums in another order may round some numbers to the next level.
SAME_WIRE = 0.03
HEADS = (24, 12, 6, 3, 1)


@torch.inference_mode()
def speeds(equipment: Equipment) -> Iterator[Finding]:
    """Times kernels; medians count."""
    yield from _attention(equipment)
    yield from _merging(equipment)
    yield from _wires(equipment)


def _normal(equipment: Equipment, *shape: int) -> Tensor:
    return torch.randn(shape, device=equipment.device, dtype=equipment.pick(torch.bfloat16, torch.float32))


def _attention(equipment: Equipment) -> Iterator[Finding]:
    names = [name for name, usable, _ in available() if usable and name not in ("naive", "flex")]
    names = [name for name in names if not (name == "triton" and interpreted())]
    known = next((bounds for part, bounds in TFLOPS.items() if part in equipment.name), {})
    for tokens in equipment.pick(TOKENS, (64,)):
        for heads in equipment.pick(HEADS, (2,)):
            q, k, v = (_normal(equipment, 1, heads, tokens, 128) for _ in range(3))
            cases = [(name, forced(name, q, k, v, None)) for name in names]
            work = 4.0 * q.numel() * tokens / 1e12
            for row in timed(cases, tokens, REPEATS, equipment.device, tflops=work):
                bound = known.get(row["name"]) if (tokens, heads) == (TOKENS[0], HEADS[0]) else None
                yield _rate(f"TFLOP/s of {row['name']}, {heads} heads, {tokens} tokens", row, "tflops", bound)


def _rate(check: str, row: dict[str, Any], unit: str, bound: float | None = None) -> Finding:
    if row["seconds_median"] is None:
        return Finding(check, f"skipped: {row['skipped']}")
    return at_least(check, round(row[unit], 2), bound)


def _merging(equipment: Equipment) -> Iterator[Finding]:
    heads, tokens = equipment.pick((24, 2304), (2, 32))
    for count in equipment.pick((2, 4, 8), (2,)):
        parts = [
            (_normal(equipment, 1, heads, tokens, 128), _normal(equipment, 1, heads, tokens).float())
            for _ in range(count)
        ]
        moved = (count + 1) * sum(x.nbytes for x in parts[0]) / 1e9
        for row in timed([("merge", partial(merge, parts))], tokens, REPEATS, equipment.device, gigabytes=moved):
            yield _rate(f"GB/s of a merge of {count}", row, "gigabytes_per_second")


def _wires(equipment: Equipment) -> Iterator[Finding]:
    """Compares and times encoding and decoding of one rank's keys and values, by the bytes of the plain message."""
    values = _normal(equipment, *equipment.pick((2304, 2, 24, 128), (32, 2, 2, 64)))
    for name, wire in WIRES.items():
        message = wire.encode(values)
        read, plain = wire.decode(message, tuple(values.shape)).cpu(), values.cpu()
        by_host = wire.decode(wire.encode(plain), tuple(values.shape))
        apart = float((read - by_host).norm() / by_host.norm())
        yield at_most(f"difference of the wire {name} from a processor's", round(apart, 5), SAME_WIRE)
        cases = [(name, partial(_there_and_back, wire, values, message))]
        for row in timed(cases, values.numel(), REPEATS, equipment.device, gigabytes=values.nbytes / 1e9):
            yield _rate(f"GB/s through the wire {name}", row, "gigabytes_per_second")


def _there_and_back(wire: Wire, values: Tensor, last: Tensor) -> Tensor:
    return wire.decode(wire.encode(values, last), tuple(values.shape))
