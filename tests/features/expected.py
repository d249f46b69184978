"""What is refused, by feature and group of strategies, and why; everything else runs."""

from __future__ import annotations

from partsong.parallel.ranks.mesh import TOKEN_AXES
from tests.features.groups import GROUPS

#: Words of the errors, by what the table below calls them.
REASONS = {
    "rows": "it works on rows of an image, not on tokens",
    "columns": "has a DoRA, which looks across all columns of a weight, and a rank has only some; call fuse_lora()",
    "convolutions": "adapts a convolution in a way that looks across rows; merge the adapter (fuse_lora)",
    "residuals": "was given; run a ControlNet with Ulysses instead",
    "one by one": "keeps the whole weights, of which ranks have shares under",
    "offloaded": "moves weights that",
    "in one piece": "changes the type of a layer's weights while a block runs, and under",
    "one after the other": "counts on steps that come one after the other, whole, which",
    "two caches": "would both leave out blocks; call disable_cache(), or drop the strategy",
    "compares": "decides by what a rank computes, which is not the same on all ranks of",
    "counts branches": "counts the calls for each branch of guidance, and the ranks of CfgParallel make some of them",
    "encodes": "has no encode_prompt(), so its embeddings cannot be sent; drop it",
    "guider": "changes layers for one of its calls, and",
    "no autoencoder": "has no autoencoder to cut; drop ParallelVae",
}

_ON_ROWS: dict[str, str] = dict.fromkeys(("PatchPipeline", "LaggedLayers", "LayerPipeline", "StepCache"), "rows")
_CUT_ROWS = tuple(
    name for name, group in GROUPS.items() if set(group[0].axes) & set(TOKEN_AXES) and not group[0].changes_parts
)
_SHARES = ("TensorParallel", "ShardedWeights", "LayerPipeline")
_ONE_BY_ONE: dict[str, str] = dict.fromkeys(_SHARES, "one by one") | {"OffloadWeights": "offloaded"}
_REORDERED = (
    *("PatchPipeline", "LaggedLayers", "TimeParallel", "DraftedSteps"),
    *("DisplacedPatch", "PartialPatch", "LatentParallel", "LayerPipeline"),
)
_COUNTING: dict[str, str] = dict.fromkeys(_REORDERED, "one after the other") | {"StepCache": "two caches"}
#: The modular pipelines that are tried hold the blocks of denoising, neither text encoders nor an autoencoder.
_DENOISING_ONLY = {"EncodeOnce": "encodes", "ParallelVae": "no autoencoder"}

#: Feature -> group -> reason.
REFUSED: dict[str, dict[str, str]] = {
    "LoRA on a UNet, convolutions too": _ON_ROWS,
    "DoRA": {"TensorParallel": "columns"},
    "DoRA on a UNet's convolutions": _ON_ROWS | dict.fromkeys(_CUT_ROWS, "convolutions"),
    "ControlNet on a transformer": dict.fromkeys(("PatchPipeline", "TimeParallel", "DraftedSteps"), "residuals"),
    "ControlNet on a UNet": _ON_ROWS | dict.fromkeys(("TimeParallel", "DraftedSteps"), "residuals"),
    "IP-Adapter on a UNet": _ON_ROWS,
    "enable_sequential_cpu_offload": _ONE_BY_ONE,
    "group offload": _ONE_BY_ONE,
    "group offload to disk": _ONE_BY_ONE,
    "enable_cache, PyramidAttentionBroadcast": _COUNTING,
    "enable_cache, TaylorSeer": _COUNTING,
    "enable_cache, TaylorSeer, one sample": _COUNTING | {"CfgParallel": "counts branches"},
    "enable_cache, FirstBlockCache": dict.fromkeys(GROUPS, "compares"),
    "layerwise casting": dict.fromkeys(("ShardedWeights", "OffloadWeights"), "in one piece"),
    "another scheduler on a UNet": _ON_ROWS,
    "three branches of guidance in a batch": _ON_ROWS | {"EncodeOnce": "encodes"},
    "three branches of guidance, one by one": _DENOISING_ONLY,
    "ModularPipeline": _DENOISING_ONLY,
    "ModularPipeline, one sample": _DENOISING_ONLY,
    "ModularPipeline, SkipLayerGuidance": _DENOISING_ONLY
    | dict.fromkeys(("CfgParallel", "PatchPipeline", "TimeParallel", "DraftedSteps"), "guider"),
}

#: What is refused only under a plan: fusing comes too late.
REFUSED_AFTER: dict[str, dict[str, str]] = {"DoRA fused": {"TensorParallel": "columns"}}
