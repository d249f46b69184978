"""What users put on a pipeline, the rows of docs/with.md: each with the pipeline that it is tried on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
    FirstBlockCacheConfig,
)

from tests.features.loras import CONVOLUTIONS, LAYERS, load_lora
from tests.pipelines.case import Case, denoisers
from tests.pipelines.cases import CASES

HERE = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row: what is put on a pipeline.

    Attributes:
        name: what the page calls it.
        case: a tiny pipeline and one call of it.
        put: puts it on the pipeline.
        first: is done to the pipeline before everything else.
        before: it is tried on a pipeline that is parallelized afterwards.
        after: it is tried on one that is parallelized already, and has made a picture.
        call: more arguments of the call.
    """

    name: str
    case: str
    put: Callable[[Any], None]
    first: Callable[[Any], None] = lambda pipe: None
    before: bool = True
    after: bool = True
    call: dict[str, Any] = field(default_factory=dict)
    samples: int = 2

    def made(self) -> Case:
        case = CASES[self.case]
        return replace(case, samples=self.samples, call=lambda samples: case.call(samples) | self.call)


TRANSFORMER, UNET, FLUX = "StableDiffusion3Pipeline", "StableDiffusionPipeline", "FluxPipeline"


def one_lora(pipe: Any) -> None:
    load_lora(pipe, "one", 1)


def two_loras(pipe: Any) -> None:
    load_lora(pipe, "one", 1)
    load_lora(pipe, "two", 2)
    pipe.set_adapters(["one", "two"], [0.7, -0.4])


def swapped_lora(pipe: Any) -> None:
    load_lora(pipe, "two", 2)
    pipe.set_adapters("two")
    pipe.delete_adapters("one")


def other_weight(pipe: Any) -> None:
    pipe.set_adapters(["one"], [0.3])


def fused_lora(pipe: Any) -> None:
    load_lora(pipe, "one", 1)
    pipe.fuse_lora()


def unloaded_lora(pipe: Any) -> None:
    pipe.unload_lora_weights()


def dora(pipe: Any) -> None:
    load_lora(pipe, "one", 1, dora=True)


def lora_on_convolutions(pipe: Any) -> None:
    load_lora(pipe, "one", 1, layers=[*LAYERS, *CONVOLUTIONS])


def dora_on_convolutions(pipe: Any) -> None:
    load_lora(pipe, "one", 1, layers=CONVOLUTIONS, dora=True)


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
        part.enable_group_offload(
            onload_device=HERE, offload_device=HERE, offload_type="block_level", num_blocks_per_group=1
        )


def group_offload_from_disk(pipe: Any) -> None:
    folder = Path(tempfile.mkdtemp())
    for part in denoisers(pipe):
        part.enable_group_offload(
            onload_device=HERE,
            offload_device=HERE,
            offload_type="leaf_level",
            offload_to_disk_path=str(folder),
        )


def cast_layerwise(pipe: Any) -> None:
    for part in denoisers(pipe):
        part.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float64)


def compiled(pipe: Any) -> None:
    for part in denoisers(pipe):
        part.compile_repeated_blocks(backend="eager")


def counted_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 2000),
            spatial_attention_block_identifiers=("transformer_blocks",),
            current_timestep_callback=lambda: 500,
        )
    )


def taylor_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(
        TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, taylor_factors_dtype=torch.float64)
    )


def first_block_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))


def tiled(pipe: Any) -> None:
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 4
    pipe.enable_vae_tiling() if hasattr(pipe, "enable_vae_tiling") else pipe.vae.enable_tiling()


def sliced(pipe: Any) -> None:
    pipe.vae.enable_slicing()


def other_scheduler(pipe: Any) -> None:
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)


def other_unet_scheduler(pipe: Any) -> None:
    pipe.scheduler = EulerDiscreteScheduler()


PICTURE = {"output_type": "pt"}
LONGER = {"num_inference_steps": 4}

FEATURES = {
    feature.name: feature
    for feature in (
        Feature(name="LoRA", case=TRANSFORMER, put=one_lora),
        Feature(name="LoRA on a UNet, convolutions too", case=UNET, put=lora_on_convolutions),
        Feature(name="several LoRAs with weights", case=TRANSFORMER, put=two_loras),
        Feature(name="LoRA swapped for another", case=TRANSFORMER, first=one_lora, put=swapped_lora, before=False),
        Feature(name="LoRA with another weight", case=TRANSFORMER, first=one_lora, put=other_weight, before=False),
        Feature(name="LoRA unloaded", case=TRANSFORMER, first=one_lora, put=unloaded_lora, before=False),
        Feature(name="LoRA fused", case=TRANSFORMER, put=fused_lora),
        Feature(name="DoRA", case=TRANSFORMER, put=dora),
        Feature(name="DoRA on a UNet's convolutions", case=UNET, put=dora_on_convolutions),
        Feature(name="ControlNet on a transformer", case="StableDiffusion3ControlNetPipeline", put=lambda pipe: None, after=False),
        Feature(name="ControlNet on a UNet", case="StableDiffusionControlNetPipeline", put=lambda pipe: None, after=False),
        Feature(name="IP-Adapter", case="StableDiffusionPipeline + IP-Adapter x 1", put=lambda pipe: None, after=False),
        Feature(name="enable_model_cpu_offload", case=TRANSFORMER, put=lambda pipe: pipe.enable_model_cpu_offload(device="cpu")),
        Feature(name="enable_sequential_cpu_offload", case=TRANSFORMER, put=sequential_offload),
        Feature(name="group offload", case=TRANSFORMER, put=group_offload),
        Feature(name="group offload to disk", case=TRANSFORMER, put=group_offload_from_disk),
        Feature(name="enable_cache that counts steps", case=FLUX, put=counted_cache, call=LONGER),
        Feature(name="TaylorSeer", case=FLUX, put=taylor_cache, call=LONGER),
        Feature(name="TaylorSeer, one sample", case=FLUX, put=taylor_cache, call=LONGER, samples=1),
        Feature(name="enable_cache that compares", case=FLUX, put=first_block_cache, call=LONGER),
        Feature(name="layerwise casting", case=TRANSFORMER, put=cast_layerwise),
        Feature(name="VAE tiling", case=UNET, put=tiled, call=PICTURE),
        Feature(name="VAE slicing", case=UNET, put=sliced, call=PICTURE),
        Feature(name="regional torch.compile", case=TRANSFORMER, put=compiled),
        Feature(name="another scheduler", case=TRANSFORMER, put=other_scheduler),
        Feature(name="another scheduler on a UNet", case=UNET, put=other_unet_scheduler),
        Feature(name="three branches of guidance in a batch", case="StableDiffusionInstructPix2PixPipeline", put=lambda pipe: None, after=False),
    )
}
