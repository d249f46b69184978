"""Builds denoisers of about 100 M random parameters and their inputs, for timing on any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partsong.parallel import Strategy
from partsong.parallel.exchange.displaced_patch import DisplacedPatch
from partsong.parallel.exchange.partial_patch import PartialPatch
from partsong.parallel.exchange.ring import Ring
from partsong.parallel.exchange.sync_patch import SyncPatch
from partsong.parallel.exchange.ulysses import Ulysses
from partsong.parallel.sharded_weights.strategy import ShardedWeights
from partsong.parallel.tensor_parallel.strategy import TensorParallel

__all__ = ["BENCH_MODELS", "WIDE_MODELS", "BenchModel"]

WIDTH, HEADS = 768, 12
TEXT_TOKENS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """Describes a model to time.

    Attributes:
        name: as it appears in result tables.
        build: makes the module with random weights, whose seed the caller sets.
        inputs: makes keyword arguments for a number of image tokens (positions of the latent) and a timestep in [0, 1].
        mixes: strategies with which to time it, one or several together.
        peers: whether other libraries can split it too.
        dtype: of weights and inputs on a GPU; on a CPU it is always single precision.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, float], dict[str, Any]]
    mixes: tuple[tuple[Strategy, ...], ...] = (
        (Ulysses(),),
        (Ring(),),
        (Ulysses(wire="int8"),),
        (Ring(wire="int8"),),
        (DisplacedPatch(warmup_steps=1),),
        (DisplacedPatch(warmup_steps=1, wire="int8"),),
        (DisplacedPatch(warmup_steps=1, wire="1bit"),),
        (TensorParallel(),),
        (ShardedWeights(), Ulysses()),
    )
    peers: bool = True
    dtype: torch.dtype = torch.float32


def _flux(**changed: Any) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    settings: dict[str, Any] = {
        "in_channels": 64,
        "num_layers": 2,
        "num_single_layers": 6,
        "attention_head_dim": WIDTH // HEADS,
        "num_attention_heads": HEADS,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "axes_dims_rope": (16, 24, 24),
    }
    return FluxTransformer2DModel(**settings | changed)


def _flux_inputs(tokens: int, time: float) -> dict[str, Any]:
    side = round(tokens**0.5)
    ids = torch.zeros(tokens, 3)
    ids[:, 1], ids[:, 2] = torch.arange(tokens) // side, torch.arange(tokens) % side
    draw = torch.Generator().manual_seed(1)
    return {
        "hidden_states": _randn(draw, 1, tokens, 64),
        "encoder_hidden_states": _randn(draw, 1, TEXT_TOKENS, WIDTH),
        "pooled_projections": _randn(draw, 1, WIDTH),
        "timestep": torch.tensor([time]),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT_TOKENS, 3),
    }


def _wan(**changed: Any) -> nn.Module:
    from diffusers import WanTransformer3DModel

    settings: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": HEADS,
        "attention_head_dim": WIDTH // HEADS,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": WIDTH,
        "freq_dim": 256,
        "ffn_dim": 4 * WIDTH,
        "num_layers": 9,
        "rope_max_seq_len": 128,
    }
    return WanTransformer3DModel(**settings | changed)


def _at_full_width(build: Callable[..., nn.Module], **changed: Any) -> nn.Module:
    """Builds a model with the blocks of the published one, but few of them, in half the memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build(**changed)
    finally:
        torch.set_default_dtype(before)


def _wan_inputs(tokens: int, time: float) -> dict[str, Any]:
    side = round((tokens / 4) ** 0.5)  # four latent frames
    draw = torch.Generator().manual_seed(1)
    return {
        "hidden_states": _randn(draw, 1, 16, tokens // side**2, 2 * side, 2 * side),
        "encoder_hidden_states": _randn(draw, 1, TEXT_TOKENS, WIDTH),
        "timestep": torch.tensor([time * 1000]),
    }


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    kind: Any = UNet2DConditionModel  # its annotations name only one of the forms it takes
    return kind(
        block_out_channels=(128, 256, 512),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 4),
        attention_head_dim=(2, 4, 8),
        cross_attention_dim=WIDTH,
        use_linear_projection=True,
    )


def _unet_inputs(tokens: int, time: float) -> dict[str, Any]:
    side = round(tokens**0.5)
    draw = torch.Generator().manual_seed(1)
    return {
        "sample": _randn(draw, 1, 4, side, side),
        "encoder_hidden_states": _randn(draw, 1, TEXT_TOKENS, WIDTH),
        "timestep": torch.tensor(time * 1000),
    }


def _randn(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


BENCH_MODELS = {
    row.name: row
    for row in (
        BenchModel(name="flux-like", build=_flux, inputs=_flux_inputs),
        BenchModel(name="wan-like", build=_wan, inputs=_wan_inputs),
        BenchModel(
            name="sdxl-like",
            build=_unet,
            inputs=_unet_inputs,
            mixes=(
                (SyncPatch(),),
                (Ulysses(),),
                (Ring(),),
                (DisplacedPatch(warmup_steps=1),),
                (DisplacedPatch(warmup_steps=1, norms="forecast"),),
                (DisplacedPatch(warmup_steps=1, wire="1bit"),),
                (PartialPatch(warmup_steps=1),),
                (PartialPatch(warmup_steps=1, norms="forecast"),),
            ),
            peers=False,
        ),
    )
}

#: Models for GPUs: blocks as wide as those of Flux and of Wan 14B, a quarter of Flux' and an eighth of Wan's.
WIDE_MODELS = {
    row.name: row
    for row in (
        BenchModel(
            name="flux-wide",
            build=lambda: _at_full_width(
                _flux,
                num_layers=5,
                num_single_layers=10,
                attention_head_dim=128,
                num_attention_heads=24,
                axes_dims_rope=(16, 56, 56),
            ),
            inputs=_flux_inputs,
            dtype=torch.bfloat16,
        ),
        BenchModel(
            name="wan-wide",
            build=lambda: _at_full_width(
                _wan, num_layers=5, attention_head_dim=128, num_attention_heads=40, ffn_dim=13824
            ),
            inputs=_wan_inputs,
            dtype=torch.bfloat16,
        ),
    )
}
