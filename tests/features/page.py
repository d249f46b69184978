"""Writes docs/with.md out of the table that the tests compare with what happens."""

from __future__ import annotations

from tests.features.expected import REASONS, REFUSED, REFUSED_AFTER
from tests.features.features import FEATURES, Feature
from tests.features.groups import GROUPS

_HEAD = """# What runs with what

Whether what you put on a pipeline, such as a LoRA or offloading, runs under a plan. Every cell is a test: two ranks and
a tiny random pipeline of diffusers in float64, against the same pipeline with the same feature on one rank without a
plan. *yes* means that both pictures agree to 1e-9, a second one too, that the bytes are those which `explain()`
predicts, and that the pipeline makes the same picture after `undo()`. Approximate strategies run at the setting at
which they are exact. *before* and *after* say which was tried: the feature first and then `parallelize()`, or the
feature on a pipeline under a plan that has made a picture. `python -m tests.tables` writes this page.
"""

_EVERY = """## With every strategy

| feature | pipeline | tried |
|---|---|---|"""

_SOME = """
## With some strategies

*no* is refused before any work, with one error on all ranks, for the [reason](#reasons) of that number.
"""

_TAIL = """## Order

Call diffusers' own methods in any order, on every rank, between pictures. Under a plan, those that change layers
(`load_lora_weights`, `unload_lora_weights`, `fuse_lora`, `delete_adapters`, `load_ip_adapter`, `add_adapter`,
`enable_cache`, `enable_layerwise_casting`, the offloads and their opposites) take the plan off, do their work on the
bare model and put the plan on again. That costs next to nothing where ranks have whole weights; ShardedWeights gathers
the whole model on every rank for a moment, TensorParallel puts its weights together again, and a model that was read in
shares is read whole. `set_adapters` costs nothing. Layers that were changed past these methods, such as by peft's own
functions, are noticed and refused at the next picture.

## Arguments of a call

What a pipeline passes to its model by position or by keyword reaches the model in the same way. So what wraps a model's
`forward` and reads keywords sees the scale of a LoRA in `joint_attention_kwargs={"scale": 0.5}`.

## A second pipeline around the same model

A plan follows the scheduler of its own pipeline. A second pipeline around the same model, such as
`OtherPipeline(**pipe.components)`, and a loop of your own with another scheduler run under the plan too: their steps
are known by their timesteps. Give such a pipeline a generator on every rank, since the plan shares the noise of its own
pipeline only. What steps keep for later ones is forgotten when a pipeline's call ends, and when another one calls the
model in the middle of it, such as in a callback: the steps after that are computed like first steps.

## LoRA

TensorParallel cuts the two matrices of a LoRA with the layer they are on. Ranks compare their adapters whenever a plan
is put on: other adapters on one rank, or other weights of them, are an error on all. Under a plan an adapter for
another model is one error, also where diffusers only warns and continues without it:

    load_lora_weights() has changed no layer of this StableDiffusion3Pipeline; is the adapter one for another model?

## Offloading

Hooks, orders and pictures are tested on CPUs, the memory of a GPU is not. A plan's hooks stand inside of
`enable_model_cpu_offload`, which takes off what is outside of it at the end of each call. OffloadWeights stands for
diffusers' group offload of the denoiser's blocks: its copies yield to the exchanges of other strategies.

## Caches of diffusers

A cache of `enable_cache` that counts steps leaves out the same layers on every rank. One that compares values would
decide on each rank by what that rank has; StepCache does so too, and its ranks decide together.

## ControlNets and modular pipelines

ControlNets are cut as the model is; [support](support.md#what-the-matrix-leaves-out) says which ones. Give modular
pipelines a generator: without one every rank draws noise of its own, and the first step says so.
"""


#: What users do to an object under a plan besides calling it, and what happens then; tests/parallel holds it.
_YOURS = (
    (
        "call for gradients",
        "inputs and weights get the gradients of one rank, on every rank, under DataParallel and CfgParallel "
        "(with one sample every rank computes all); every rank must compute the same loss, which the backward"
        " pass checks. Under other strategies such a call is refused: wrap it in `torch.no_grad()` or "
        "`torch.inference_mode()`",
    ),
    (
        "`save_pretrained()`, `state_dict()`",
        "the whole weights, on any rank by itself; ShardedWeights refuses, as each rank has only its share: "
        "call `undo()` first",
    ),
    (
        "`load_state_dict()`",
        "as without a plan; refused where ranks have parts of the weights (TensorParallel, ShardedWeights), or have "
        "them in the host's memory (OffloadWeights)",
    ),
    (
        "`copy.copy()`, `copy.deepcopy()`, pickle, `torch.save()` of a model or a pipeline",
        "refused: a copy would hold hooks that work for the original; copy before `parallelize()` or after `undo()`",
    ),
    (
        "`.to(dtype)`, `.to(device)`, `.half()`, `.float()`",
        "weights are cast and moved, before and after calls, and stay so after `undo()`; OffloadWeights leaves "
        "blocks where they are, and `undo()` puts them where they were before `parallelize()`",
    ),
    (
        "your own forward hook on a layer",
        "it sees what its own rank computes: its tokens, its samples or its columns; the first call warns "
        "once and names it. One on the model itself sees the whole call",
    ),
    (
        "another transformer (`pipe.transformer = ...`)",
        "the next call is refused: `undo()` and `parallelize()` again",
    ),
    (
        "enter a plan again after `undo()`, or `generate()` with it",
        "refused: `parallelize()` again",
    ),
    (
        "an error or an interruption in a call",
        "the plan makes the next picture; `undo()` leaves the model as it was. Under ShardedWeights the "
        "weights come back where every rank stopped at the same point; where one failed alone, the model says"
        " so and is to be loaded again",
    ),
)


def with_page() -> str:
    """The page, as Markdown."""
    used = [key for groups in REFUSED.values() for key in groups.values()]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(used), 1)}
    lines = [_HEAD, _EVERY]
    everywhere = [feature for feature in FEATURES.values() if not _refused(feature.name)]
    lines += [f"| {each.name} | {_pipeline(each)} | {', '.join(each.orders)} |" for each in everywhere]
    lines += [_SOME, "| feature | pipeline | tried | " + " | ".join(f"`{group}`" for group in GROUPS) + " |"]
    lines.append("|---" * (3 + len(GROUPS)) + "|")
    for feature in FEATURES.values():
        if _refused(feature.name):
            cells = " | ".join(_cell(feature.name, group, numbers) for group in GROUPS)
            lines.append(f"| {feature.name} | {_pipeline(feature)} | {', '.join(feature.orders)} | {cells} |")
    reasons = ["", "## Reasons", "", *(f"{number}. ... {REASONS[key]} ..." for key, number in numbers.items())]
    yours = ["", "## What you do yourself", "", "| what you do under a plan | what happens |", "|---|---|"]
    yours += [f"| {what} | {happens} |" for what, happens in _YOURS]
    return "\n".join([*lines, *reasons, *yours, "", _TAIL])


def _refused(name: str) -> bool:
    return bool(REFUSED.get(name) or REFUSED_AFTER.get(name))


def _cell(name: str, group: str, numbers: dict[str, int]) -> str:
    refused, late = REFUSED.get(name, {}), REFUSED_AFTER.get(name, {})
    if group in late:
        return f"before yes, after no [{numbers[late[group]]}]"
    return f"no [{numbers[refused[group]]}]" if group in refused else "yes"


def _pipeline(feature: Feature) -> str:
    return feature.on.partition(" ")[0].removesuffix("Pipeline") + ("" if feature.samples > 1 else ", one sample")
