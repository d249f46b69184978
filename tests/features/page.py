"""Writes docs/with.md out of the table that the tests compare with what happens."""

from __future__ import annotations

from tests.features.expected import REASONS, REFUSED, REFUSED_AFTER
from tests.features.features import FEATURES, Feature
from tests.features.groups import GROUPS

_HEAD = """# What runs with what

This is what users put on a pipeline, tried with each strategy. The page is written from the tests' own table by
`python -m tests.tables`, and every cell is a test. It takes two ranks and a tiny random pipeline of diffusers in
float64, against the same pipeline with the same feature on one process without a plan. *yes* means that both pictures
agree to 1e-9, that a second one does too, that the bytes are those which `explain()` predicts, and that the pipeline
makes the same picture after `undo()`. A number says why the feature is refused, [below](#reasons), with one error on
all ranks before any work. Approximate strategies run at the setting at which they are exact.

*before* and *after* say in which order it was tried: the feature first and then `parallelize()`, or the feature on a
pipeline under a plan that has made a picture. Where both stand, the cell holds for both.
"""

_TAIL = """## Order

Call diffusers' own methods in any order. Under a plan, those that change layers (`load_lora_weights`,
`unload_lora_weights`, `fuse_lora`, `delete_adapters`, `load_ip_adapter`, `add_adapter`, `enable_cache`,
`enable_layerwise_casting`, the offloads and their opposites) take the plan off, do their work on the bare model and put
the plan on again. So call them on every rank, between pictures. That costs as much as `undo()` and `parallelize()`:
nothing to speak of where ranks have whole weights; ShardedWeights gathers the whole model on every rank for a moment,
TensorParallel puts its weights together again, and a model that was read in shares is read whole. `set_adapters`,
which weighs what is loaded, costs nothing. Layers that were changed past these methods, such as by peft's own
functions, are noticed and refused at the next picture.

## Arguments of a call

What a pipeline passes to its model by position reaches the model by position, and what it passes by keyword by
keyword, under every strategy. So what wraps a model's `forward` and reads keywords hears the scale of a LoRA in
`joint_attention_kwargs={"scale": 0.5}`.

## A second pipeline around the same model

A plan follows the scheduler of its own pipeline. A second pipeline around the same model, such as
`OtherPipeline(**pipe.components)`, and a loop of your own with another scheduler run under the plan too. A call of the
model that belongs to no generation of the plan's pipeline begins one, and its steps are known by its timesteps. Give
such a pipeline a generator on every rank, since the plan shares the noise of its own pipeline only. What steps keep for
later ones is forgotten when a pipeline's call ends, and when another one calls the model in the middle of it, such as
in a callback: the steps after that are computed like first steps.

## LoRA

TensorParallel cuts the two matrices of a LoRA with the layer they are on. Ranks compare their adapters whenever a plan
is put on: other adapters on one rank, or other weights of them, are an error on all. Under a plan an adapter for
another model is one error, also where diffusers only warns and continues without it:

    load_lora_weights() has changed no layer of this StableDiffusion3Pipeline; is the adapter one for another model?

## Offloading

These were tried on CPUs, where the device that computes is the one that weights wait on: hooks, orders and pictures
are tested, the memory of a GPU is not. A plan's hooks stand inside of `enable_model_cpu_offload`, which takes off what
is outside of it at the end of each call.

## Caches of diffusers

`enable_cache` counts steps or compares values. One that counts leaves out the same layers on every rank, so ranks never
wait for each other for nothing. One that compares would decide on each rank by what that rank has; StepCache does so
too, and its ranks decide together.

## ControlNets

They are cut as the model is and not repeated on every rank; [support](support.md) says which ones.

## Modular pipelines

Give them a generator: without one every rank draws noise of its own, and the first step says so. EncodeOnce needs an
`encode_prompt`, which they do not have.
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
        "as without a plan; refused where ranks have parts of the weights (TensorParallel, ShardedWeights)",
    ),
    (
        "`copy.copy()`, `copy.deepcopy()`, pickle, `torch.save()` of a model or a pipeline",
        "refused: a copy would hold hooks that work for the original; copy before `parallelize()` or after `undo()`",
    ),
    (
        "`.to(dtype)`, `.to(device)`, `.half()`, `.float()`",
        "weights are cast and moved, before and after calls, and stay so after `undo()`",
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
    lines = ["| feature | pipeline | tried | " + " | ".join(f"`{group}`" for group in GROUPS) + " |"]
    lines.append("|---" * (3 + len(GROUPS)) + "|")
    for feature in FEATURES.values():
        cells = [_cell(feature.name, group, numbers) for group in GROUPS]
        lines.append(f"| {feature.name} | {_pipeline(feature)} | {', '.join(feature.orders)} | {' | '.join(cells)} |")
    reasons = ["", "## Reasons", "", *(f"[{number}] ... {REASONS[key]} ...\n" for key, number in numbers.items())]
    yours = ["", "## What you do yourself", "", "| what you do under a plan | what happens |", "|---|---|"]
    yours += [f"| {what} | {happens} |" for what, happens in _YOURS]
    return "\n".join([_HEAD, *lines, *reasons[:-1], reasons[-1].rstrip("\n"), *yours, "", _TAIL])


def _cell(name: str, group: str, numbers: dict[str, int]) -> str:
    refused, late = REFUSED.get(name, {}), REFUSED_AFTER.get(name, {})
    if group in late:
        return f"before yes, after no [{numbers[late[group]]}]"
    return f"no [{numbers[refused[group]]}]" if group in refused else "yes"


def _pipeline(feature: Feature) -> str:
    return feature.on.partition(" ")[0].removesuffix("Pipeline") + ("" if feature.samples > 1 else ", one sample")
