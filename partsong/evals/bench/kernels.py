"""Times kernels against each other and against PyTorch's own: attention, segments, the token head and call overhead.

It runs on a GPU in bfloat16 with the lengths that papers use, and on a CPU in float32 with a few short ones. A case
that the machine cannot run has a row with the reason. The cases of a group are timed in turn and the median counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from partsong.errors import UnsupportedError
from partsong.kernels import Causal, Segment, attention, available, force_backend, token_stats
from partsong.kernels.backends.triton_attention import interpreted

__all__ = ["GPU_LENGTHS", "HEAD_SIZES", "forced", "inputs", "run", "timed"]

GPU_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
CPU_LENGTHS = (1024,)
#: Tokens and channels are the same at every length, as in FlashAttention's benchmark, so that rows are comparable.
GPU_TOKENS, GPU_CHANNELS = 16384, 2048
HEAD_SIZES = (64, 128)
NUM_SEGMENTS = 8
#: The longest sequence to time `naive` at, because it stores a full matrix of logits.
NAIVE_LENGTH = 2048
VOCABULARY, HEAD_CHANNELS = 126464, 4096
PEERS = {
    "torch SDPA": None,
    "torch SDPA cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch SDPA flash": SDPBackend.FLASH_ATTENTION,
    "torch SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Case = tuple[str, Callable[[], Any]]


def run(*, repeats: int = 5, tokens: Sequence[int] = (), device: str | None = None) -> list[dict[str, Any]]:
    """Times all groups.

    Args:
        repeats: rounds; the median counts.
        tokens: lengths of sequences; if empty, 1024 to 65536 on a GPU and 1024 on a CPU.
        device: torch device type; None is the GPU if there is one.

    Returns:
        A row per case with ``name size seconds_median ratio_to_serial`` (speed relative to the first case of the group)
        and, where they apply, ``tflops``, ``gigabytes_per_second`` or ``skipped``.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    lengths = tuple(tokens) or (GPU_LENGTHS if device == "cuda" else CPU_LENGTHS)
    rows = []
    with torch.inference_mode():
        for width in HEAD_SIZES:
            for causal in (False, True):
                for length in lengths:
                    rows += _attention(device, length, width, causal, repeats)
        for length in lengths:
            rows += _segments(device, length, repeats)
        rows += _token_head(device, repeats)
        if device == "cpu":
            rows += _overhead(max(1024, min(lengths)), repeats)
    return rows


def inputs(device: str, length: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws random q, k and v of one length and head size, with as many heads and rows as suit the device."""
    on_gpu = device == "cuda"
    batch = max(1, GPU_TOKENS // length) if on_gpu else 1
    heads = GPU_CHANNELS // width if on_gpu else 8
    dtype = torch.bfloat16 if on_gpu else torch.float32
    draw = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, length, width)
    q, k, v = (torch.randn(shape, generator=draw, device=device, dtype=dtype) for _ in range(3))
    return q, k, v


def _attention(device: str, length: int, width: int, causal: bool, repeats: int) -> list[dict[str, Any]]:
    q, k, v = inputs(device, length, width)
    mask = Causal() if causal else None
    group = f"attention D{width} {'causal' if causal else 'full'}"
    cases: list[Case] = [(f"{group} {name}", _peer(kind, q, k, v, causal)) for name, kind in PEERS.items()]
    rows = []
    for name, usable, reason in available():
        case = f"{group} {name}"
        if not usable or (name == "triton" and interpreted()):
            rows.append(_skipped(case, length, reason))
        elif name == "naive" and length > NAIVE_LENGTH:
            rows.append(_skipped(case, length, f"stores all logits; timed up to {NAIVE_LENGTH}"))
        else:
            cases.append((case, forced(name, q, k, v, mask)))
    flops = 4.0 * q.numel() * length * (0.5 if causal else 1.0)
    return [*timed(cases, length, repeats, device, tflops=flops / 1e12), *rows]


def _peer(kind: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Any]:
    def call() -> Tensor:
        if kind is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def forced(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Causal | None) -> Callable[[], Any]:
    """Returns a function without arguments that calls `attention` on one backend."""

    def call() -> tuple[Tensor, Tensor]:
        with force_backend(name):
            return attention(q, k, v, mask=mask)

    return call


def _segments(device: str, length: int, repeats: int) -> list[dict[str, Any]]:
    """Times the same keys in one piece and in eight, read where they are or concatenated first."""
    q, k, v = inputs(device, length, 128)
    own = [[part.clone() for part in x.chunk(NUM_SEGMENTS, dim=2)] for x in (k, v)]
    table = [Segment(*pair) for pair in zip(*own, strict=True)]
    cases: list[Case] = [("segments one piece", lambda: attention(q, k, v))]
    for name in ("triton", "cpu_flash"):
        usable = {backend for backend, ok, _ in available() if ok and not (backend == "triton" and interpreted())}
        if name in usable:
            cases += [
                (f"segments {name} one piece", forced(name, q, k, v, None)),
                (f"segments {name} in {NUM_SEGMENTS}", _in_segments(name, q, table)),
            ]
    cases.append(
        ("segments torch.cat", lambda: attention(q, torch.cat(own[0], dim=2), torch.cat(own[1], dim=2)))
    )  # fmt: skip
    return timed(cases, length, repeats, device, tflops=4.0 * q.numel() * length / 1e12)


def _in_segments(name: str, q: Tensor, table: list[Segment]) -> Callable[[], Any]:
    def call() -> tuple[Tensor, Tensor]:
        with force_backend(name):
            return attention(q, segments=table)

    return call


def _token_head(device: str, repeats: int) -> list[dict[str, Any]]:
    """Times statistics of a few rows over a large vocabulary, which cost at least one reading of the head's weight."""
    on_gpu = device == "cuda"
    vocabulary, channels, num_rows = (VOCABULARY, HEAD_CHANNELS, 32) if on_gpu else (VOCABULARY // 8, 512, 32)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    draw = torch.Generator(device).manual_seed(0)
    weight = torch.randn(vocabulary, channels, generator=draw, device=device, dtype=dtype) / math.sqrt(channels)
    hidden = torch.randn(num_rows, channels, generator=draw, device=device, dtype=dtype)

    def in_float64() -> tuple[Tensor, Tensor]:
        return torch.softmax((hidden @ weight.T).double(), dim=-1).max(dim=-1)

    def drawn_in_float64() -> tuple[Tensor, Tensor]:
        logits = (hidden @ weight.T).double()
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        return torch.softmax(logits, dim=-1).amax(dim=-1), (logits + noise).argmax(dim=-1)

    cases: list[Case] = [
        ("token head float64 softmax", in_float64),
        ("token head float64 softmax, drawn", drawn_in_float64),
        ("token head float32 softmax", lambda: torch.softmax((hidden @ weight.T).float(), dim=-1).max(dim=-1)),
        ("token head token_stats", lambda: token_stats(hidden, weight)),
        ("token head token_stats, drawn", lambda: token_stats(hidden, weight, temperature=1.0, noise=0)),
    ]
    gigabytes = weight.numel() * weight.element_size() / 1e9
    return timed(cases, vocabulary, repeats, device, gigabytes=gigabytes)


def _overhead(length: int, repeats: int) -> list[dict[str, Any]]:
    q, k, v = inputs("cpu", length, 64)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    cases: list[Case] = [
        ("overhead aten operator", lambda: operator(q, k, v)),
        ("overhead attention", lambda: attention(q, k, v)),
    ]
    return timed(cases, length, max(repeats, 9), "cpu")


def timed(
    cases: list[Case], size: int, repeats: int, device: str, tflops: float | None = None, gigabytes: float | None = None
) -> list[dict[str, Any]]:
    """Times the cases in turn after one untimed round; a case that cannot run becomes a row with the reason."""
    running, rows = [], []
    for name, call in cases:
        try:
            call()
            running.append((name, call, []))
        except (UnsupportedError, RuntimeError) as error:
            rows.append(_skipped(name, size, str(error).splitlines()[0]))
    clear = torch.empty(256 * 2**20, dtype=torch.uint8, device=device) if device == "cuda" else None
    for _ in range(repeats):
        for _, call, seconds in running:
            if clear is not None:
                clear.zero_()  # empties the cache, so that one case does not help the next
            seconds.append(_seconds(call, device))
    medians = [statistics.median(seconds) for _, _, seconds in running]
    for (name, _, seconds), median in zip(running, medians, strict=True):
        row = {"name": name, "size": size, "seconds_median": median, "ratio_to_serial": medians[0] / median}
        row |= {} if tflops is None else {"tflops": tflops / median}
        row |= {} if gigabytes is None else {"gigabytes_per_second": gigabytes / median}
        rows.append({**row, "seconds_all": seconds})
    return rows


def _seconds(call: Callable[[], Any], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _skipped(name: str, size: int, why: str) -> dict[str, Any]:
    return {"name": name, "size": size, "seconds_median": None, "ratio_to_serial": None, "skipped": why}
