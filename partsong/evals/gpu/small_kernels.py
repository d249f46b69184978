"""The stage `small`: norms and the token head against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from partsong import kernels
from partsong.evals.gpu.compared import TOLERANCE, distance, poisoned, widened
from partsong.evals.gpu.findings import Equipment, Finding, at_most

__all__ = ["small_kernels"]

_Maker = Callable[..., Tensor]


def _norm_cases(equipment: Equipment, new: _Maker) -> dict[str, tuple[Callable[..., Any], Sequence[Any]]]:
    tokens, width, side, channels = equipment.pick((333, 3072, 65, 320), (9, 32, 5, 8))
    heads, of_head = equipment.pick((24, 128), (4, 8))
    x, rest, pictures = new(2, tokens, width), new(2, tokens, width), new(2, channels, side, side)
    shift, scale, gate, weight, bias = new(2, 1, width), new(2, 1, width), new(2, 1, width), new(width), new(width)
    q, k, turn = new(2, tokens, heads, of_head), new(2, tokens, heads, of_head), new(tokens, of_head)
    mean, variance = new(2, 4), new(2, 4).abs()
    by_channel = (new(channels), new(channels))

    def apply(*given: Any) -> Tensor:
        return kernels.group_norm_apply(*given, eps=1e-5)

    def rotary(interleaved: bool, norm: Any) -> Callable[..., Any]:
        def call(q: Tensor, k: Tensor, weight: Tensor, turn: Tensor) -> Any:
            return kernels.rms_norm_rotary(
                q, k, weight, weight, turn.cos(), turn.sin(), interleaved=interleaved, norm=norm
            )

        return call

    def adaptive(x: Tensor, shift: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return kernels.adaptive_layer_norm(x, shift, scale, weight=weight, bias=bias)

    return {
        "group_norm_stats": (lambda x: kernels.group_norm_stats(x, 4), (pictures,)),
        "group_norm_stats, channels last": (
            lambda x: kernels.group_norm_stats(x, 4),
            (pictures.to(memory_format=torch.channels_last),),
        ),
        "group_norm_apply": (apply, (pictures, mean, variance, *by_channel)),
        "adaptive_layer_norm": (kernels.adaptive_layer_norm, (x, shift, scale)),
        "adaptive_layer_norm with a weight": (adaptive, (x, shift, scale, weight, bias)),
        "residual_adaptive_layer_norm": (kernels.residual_adaptive_layer_norm, (x, rest, gate, shift, scale)),
        "rms_norm_rotary of neighbours": (rotary(True, "head"), (q, k, new(of_head), turn)),
        "rms_norm_rotary of halves": (rotary(False, "head"), (q, k, new(of_head), turn)),
        "rms_norm_rotary over tokens": (rotary(True, "token"), (q, k, new(heads * of_head), turn)),
    }


def _head_cases(equipment: Equipment, new: _Maker) -> dict[str, tuple[Callable[..., Any], Sequence[Any]]]:
    rows, vocabulary, channels = equipment.pick((32, 50257, 1024), (4, 301, 32))
    hidden, weight, bias = new(1, rows, channels), new(vocabulary, channels) / channels**0.5, new(vocabulary)

    def stats(**more: Any) -> Callable[..., Any]:
        def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
            values = kernels.token_stats(hidden, weight, bias=bias, **more)
            return [getattr(values, field.name) for field in fields(values)]

        return call

    given = (hidden, weight, bias)
    return {
        "token_stats": (stats(), given),
        "token_stats, drawn": (stats(temperature=1.0, noise=3), given),
        "token_stats, softcap": (stats(softcap=30.0, logit_scale=0.7), given),
    }


@torch.inference_mode()
def small_kernels(equipment: Equipment) -> Iterator[Finding]:
    """Compares norms and the token head in every type, in fresh memory full of NaN."""
    for dtype in equipment.pick((torch.bfloat16, torch.float16, torch.float32), (torch.float32,)):
        draw = torch.Generator(equipment.device).manual_seed(2)

        def new(*shape: int, draw: torch.Generator = draw, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=draw, device=equipment.device).to(dtype)

        for name, (call, given) in {**_norm_cases(equipment, new), **_head_cases(equipment, new)}.items():
            with poisoned():
                got = _tensors(call(*given))
            want = _tensors(call(*map(widened, given)))
            yield at_most(f"{name}, {str(dtype).removeprefix('torch.')}", distance(got, want), TOLERANCE[dtype])


def _tensors(result: Any) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result
