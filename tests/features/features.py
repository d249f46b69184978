"""What users put on a pipeline, the rows of docs/with.md: each with the pipeline that it is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.features import image_prompts, putting
from tests.features.modular import MODULAR
from tests.pipelines.case import Case
from tests.pipelines.cases import CASES


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row: what is put on a pipeline.

    Attributes:
        name: what the page calls it.
        on: a tiny pipeline and one call of it.
        put: puts it on the pipeline.
        first: is done to the pipeline before everything else.
        before: it is tried on a pipeline that is parallelized afterwards.
        after: it is tried on one that is parallelized already, and has made a picture.
        call: arguments that every call has besides.
        with_it: arguments for a number of samples that calls have while the feature is on.
        samples: how many samples a call asks for.
        shows: the picture is another one with it.
        usual: it is tried without ``--full`` too, where another row does not stand for it.
    """

    name: str
    on: str
    put: Callable[[Any], None] = putting.nothing
    first: Callable[[Any], None] = putting.nothing
    before: bool = True
    after: bool = True
    call: dict[str, Any] | None = None
    with_it: Callable[[int], dict[str, Any]] = lambda samples: {}
    samples: int = 2
    shows: bool = True
    usual: bool = True

    def case(self, *, has_it: bool = True) -> Case:
        """The pipeline and its call, with the feature or without it."""
        case = (CASES | MODULAR)[self.on]
        more = self.with_it if has_it else lambda samples: {}
        return replace(
            case, samples=self.samples, call=lambda samples: case.call(samples) | (self.call or {}) | more(samples)
        )

    @property
    def orders(self) -> tuple[str, ...]:
        """Whether it is tried before `parallelize`, after it, or both."""
        return ("before",) * self.before + ("after",) * self.after


SD3, UNET, FLUX = "StableDiffusion3Pipeline", "StableDiffusionPipeline", "FluxPipeline"
#: What a pipeline has by what it is, so that there is nothing to put on it later.
BORN: dict[str, Any] = {"after": False, "shows": False}
CACHED: dict[str, Any] = {"on": FLUX, "call": {"num_inference_steps": 4}}
DECODED: dict[str, Any] = {"on": SD3, "call": {"output_type": "pt"}}
LATER: dict[str, Any] = {"on": SD3, "first": putting.one_lora, "before": False}

_ALL = (
    Feature(name="LoRA", on=SD3, put=putting.one_lora),
    Feature(name="LoRA on a UNet, convolutions too", on=UNET, put=putting.lora_on_convolutions),
    Feature(name="several LoRAs with weights", on=SD3, put=putting.two_loras),
    Feature(name="LoRA swapped for another", put=putting.swapped_lora, **LATER),
    Feature(name="LoRA given another weight", usual=False, put=putting.other_weight, **LATER),
    # tests/parallel/test_call_form.py hears such a scale in every run.
    Feature(
        name="LoRA scaled by the call",
        usual=False,
        on=FLUX,
        put=putting.one_lora,
        with_it=lambda samples: {"joint_attention_kwargs": {"scale": 0.5}},
        samples=1,
    ),
    Feature(name="LoRA unloaded", usual=False, put=putting.no_lora, **LATER),
    Feature(name="LoRA fused", on=SD3, put=putting.fused_lora),
    Feature(name="DoRA", on=SD3, put=putting.dora),
    Feature(name="DoRA fused", usual=False, on=SD3, put=putting.fused_dora),
    Feature(name="DoRA on a UNet's convolutions", usual=False, on=UNET, put=putting.dora_on_convolutions),
    Feature(name="ControlNet on a transformer", on="StableDiffusion3ControlNetPipeline", **BORN),
    Feature(name="ControlNet on a UNet", on="StableDiffusionControlNetPipeline", **BORN),
    Feature(
        name="IP-Adapter on a transformer",
        usual=False,
        on=FLUX,
        put=image_prompts.load_into_flux,
        with_it=image_prompts.flux_pictures,
    ),
    Feature(
        name="IP-Adapter on a transformer, one sample",
        on=FLUX,
        put=image_prompts.load_into_flux,
        with_it=image_prompts.flux_pictures,
        samples=1,
    ),
    Feature(
        name="IP-Adapter on a UNet",
        usual=False,
        on="StableDiffusionPipeline + one sample",
        put=image_prompts.load_into_unet,
        with_it=image_prompts.unet_pictures,
        samples=1,
    ),
    Feature(name="enable_model_cpu_offload", on=SD3, put=putting.model_offload, shows=False),
    Feature(name="enable_sequential_cpu_offload", on=SD3, put=putting.sequential_offload, shows=False),
    Feature(name="group offload", on=SD3, put=putting.group_offload, shows=False),
    Feature(name="group offload to disk", on=SD3, put=putting.group_offload_to_disk, shows=False),
    Feature(name="enable_cache, PyramidAttentionBroadcast", put=putting.broadcast_attention, **CACHED),
    Feature(name="enable_cache, TaylorSeer", usual=False, put=putting.taylor_cache, **CACHED),
    Feature(name="enable_cache, TaylorSeer, one sample", put=putting.taylor_cache, samples=1, **CACHED),
    Feature(name="enable_cache, FirstBlockCache", put=putting.first_block_cache, **CACHED),
    Feature(name="layerwise casting", on=SD3, put=putting.cast_layerwise),
    Feature(name="VAE tiling", put=putting.tiled, **DECODED),
    Feature(name="VAE slicing", put=putting.sliced, shows=False, **DECODED),
    # tests/parallel/test_compile.py tries compiled blocks in every run.
    Feature(name="torch.compile of blocks", usual=False, on=FLUX, put=putting.compiled, shows=False),
    Feature(name="another scheduler", on=SD3, put=putting.other_scheduler),
    Feature(name="another scheduler on a UNet", usual=False, on=UNET, put=putting.other_unet_scheduler),
    Feature(
        name="three branches of guidance in a batch", usual=False, on="StableDiffusionInstructPix2PixPipeline", **BORN
    ),
    Feature(name="three branches of guidance, one by one", on="ModularPipeline with three branches", samples=1, **BORN),
    Feature(name="ModularPipeline", usual=False, on="ModularPipeline", **BORN),
    Feature(name="ModularPipeline, one sample", on="ModularPipeline", samples=1, **BORN),
    Feature(name="ModularPipeline, SkipLayerGuidance", on="ModularPipeline that skips layers", samples=1, **BORN),
)
FEATURES = {feature.name: feature for feature in _ALL}
