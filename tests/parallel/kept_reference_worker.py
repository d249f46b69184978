"""Runs on every rank: a video model that attends to keys which an earlier call of it has kept, by a mask of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import WanAnimate2Transformer3DModel
from diffusers.models.transformers import transformer_wan_animate_2 as wan
from torch import Tensor

from partsong import (
    CrossAttentionCache,
    DataParallel,
    OffloadWeights,
    PackedWeights,
    ShardedWeights,
    TensorParallel,
    Ulysses,
)
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.ranks import error, gathered, on_first, refusal, staying_connected
from tests.tiny_models.weights import noise, randomized

STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "DataParallel": (DataParallel(),),
    "ShardedWeights": (ShardedWeights(),),
    "OffloadWeights": (OffloadWeights(), DataParallel()),
    "TensorParallel": (TensorParallel(),),
    "CrossAttentionCache": (CrossAttentionCache(), DataParallel()),
    "PackedWeights": (PackedWeights(), DataParallel()),
}
SAMPLES, REFERENCE, DRAWN = 2, (2, 4, 4), (3, 4, 4)


def model_of() -> Any:
    small: dict[str, Any] = {
        "text_len": 4,
        "text_dim": 8,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_heads": 2,
        "num_layers": 2,
    }
    # It turns queries in float32 whatever its weights are.
    return randomized(WanAnimate2Transformer3DModel(**small, dim=24, in_dim=12, out_dim=4)).float()


def _each(*shape: int, seed: int) -> list[Tensor]:
    return [noise(*shape, seed=seed + sample).float() for sample in range(SAMPLES)]


@torch.no_grad()
def steps(model: Any) -> Tensor:
    """Two steps behind a call that only reads the other video."""
    cache, grid = wan.WanAnimate2KVCache(2), torch.tensor([REFERENCE] * SAMPLES)
    made = []
    for time in (None, 900.0, 400.0):
        frames, *_ = REFERENCE if time is None else DRAWN
        more = (
            {"kv_cache_mode": "extract", "offset_grid_sizes": grid}
            if time is None
            else {"kv_cache_mode": "cached", "reference_grid_sizes": grid, "origin_len": 5, "origin_area": [64, 64]}
        )
        output = model(
            hidden_states=_each(4, frames, 8, 8, seed=10 * frames),
            condition_latents=_each(8, frames, 8, 8, seed=20 * frames),
            timestep=torch.full((SAMPLES,), time or 0.0),
            encoder_hidden_states=_each(3, 8, seed=5),
            encoder_hidden_states_image=noise(SAMPLES, 3, 1280, seed=77).float(),
            kv_cache=cache,
            seq_len=frames * 16,
            return_dict=False,
            **more,
        )[0]
        made += output if time is not None else []
    return torch.stack(made)


def _eager(*args: Any, _compile: bool = False, _made: Any = wan.create_block_mask, **kwargs: Any) -> Any:
    return _made(*args, **kwargs)


@staying_connected
def compared() -> dict[str, Any]:
    """Errors against one process, and what a strategy that cuts tokens says."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wan, "create_block_mask", _eager)  # it compiles the mask, which takes longer than all else
        serial = on_first(lambda: steps(model_of()))
        for name, strategies in STRATEGIES.items():
            model = model_of()
            with Mesh(**mesh_for(strategies, 2)) as mesh, parallelize(model, *strategies, mesh=mesh):
                found[name] = gathered(error(steps(model), serial))

        def cut() -> None:
            with Mesh(ulysses=2) as mesh, parallelize(model_of(), Ulysses(), mesh=mesh):
                raise AssertionError

        found["refused"] = gathered(refusal(cut))
    return found
