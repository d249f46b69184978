"""Puts features on pipelines, as their users do."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from diffusers import (
    EulerDiscreteScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from torch import nn

from tests.features.loras import CONVOLUTIONS, LAYERS, load_lora
from tests.pipelines.case import denoisers

HERE = torch.device("cpu")


def nothing(pipe: Any) -> None:
    """Leaves a pipeline that has the feature by what it is."""


def one_lora(pipe: Any) -> None:
    load_lora(pipe, "one", 1)


def two_loras(pipe: Any) -> None:
    load_lora(pipe, "one", 1)
    load_lora(pipe, "two", 2)
    pipe.set_adapters(["one", "two"], [0.7, -0.4])


def swapped_lora(pipe: Any) -> None:
    load_lora(pipe, "two", 2)
    pipe.delete_adapters("one")
    pipe.set_adapters("two")


def other_weight(pipe: Any) -> None:
    pipe.set_adapters(["one"], [0.3])


def fused_lora(pipe: Any) -> None:
    load_lora(pipe, "one", 1)
    pipe.fuse_lora()


def no_lora(pipe: Any) -> None:
    pipe.unload_lora_weights()


def dora(pipe: Any) -> None:
    load_lora(pipe, "one", 1, dora=True)


def fused_dora(pipe: Any) -> None:
    load_lora(pipe, "one", 1, dora=True)
    pipe.fuse_lora()


def lora_on_convolutions(pipe: Any) -> None:
    load_lora(pipe, "one", 1, layers=[*LAYERS, *CONVOLUTIONS])


def dora_on_convolutions(pipe: Any) -> None:
    load_lora(pipe, "one", 1, layers=CONVOLUTIONS, dora=True)


def model_offload(pipe: Any) -> None:
    pipe.enable_model_cpu_offload(device="cpu")


def sequential_offload(pipe: Any) -> None:
    pipe.enable_sequential_cpu_offload(device="cpu")
    # The method says "cpu:0", and a copy to there is no parameter any more; on a GPU nothing is copied at that point.
    for part in pipe.components.values():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            hook = getattr(module, "_hf_hook", None)
            for each in getattr(hook, "hooks", [] if hook is None else [hook]):
                each.execution_device = HERE


def group_offload(pipe: Any) -> None:
    for part in denoisers(pipe):
        part.enable_group_offload(HERE, HERE, offload_type="block_level", num_blocks_per_group=1)


def group_offload_to_disk(pipe: Any) -> None:
    folder = tempfile.mkdtemp()
    for part in denoisers(pipe):
        part.enable_group_offload(HERE, HERE, offload_type="leaf_level", offload_to_disk_path=folder)


def cast_layerwise(pipe: Any) -> None:
    for part in denoisers(pipe):
        part.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float64)


def compiled(pipe: Any) -> None:
    for part in denoisers(pipe):
        part.compile_repeated_blocks(backend="eager")


def broadcast_attention(pipe: Any) -> None:
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 2000),
        spatial_attention_block_identifiers=("transformer_blocks",),
        current_timestep_callback=lambda: 500,
    )
    pipe.transformer.enable_cache(config)


def taylor_cache(pipe: Any) -> None:
    config = TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float64)
    pipe.transformer.enable_cache(config)


def first_block_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=50.0))


def tiled(pipe: Any) -> None:
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 4
    pipe.vae.enable_tiling()


def sliced(pipe: Any) -> None:
    pipe.vae.enable_slicing()


def other_scheduler(pipe: Any) -> None:
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)


def other_unet_scheduler(pipe: Any) -> None:
    pipe.scheduler = EulerDiscreteScheduler()
