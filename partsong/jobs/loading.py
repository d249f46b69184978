"""Loads a pipeline folder on every rank, reading only the weights that the rank needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partsong import zoo
from partsong.jobs.pipeline_source import find_pipeline
from partsong.jobs.pipelines import SamplingJob, pipeline_class, read_pipeline, usual_dtype
from partsong.model_folders import DENOISERS, read_settings, text_encoders
from partsong.parallel import Mesh, Plan, Strategy, mesh_for, parallelize
from partsong.parallel.adapters import adapter_for
from partsong.parallel.encode_once import EncodeOnce
from partsong.parallel.loading.fill import can_fill, empty_model, fill_model
from partsong.parallel.loading.weight_files import WeightFiles
from partsong.parallel.plan.denoiser import Denoiser
from partsong.progress import bar_settings

__all__ = ["load_folder", "load_pipeline", "open_plan"]


def load_pipeline(model: str | Path, *strategies: Strategy, mesh: Mesh | None = None, dtype: str | None = None) -> Plan:
    """Loads a pipeline and attaches strategies to it; each rank reads only the weights that it will hold.

    With `ShardedWeights` or `TensorParallel` a rank reads its share of the denoiser from the safetensors files, and
    never holds all of it. With `EncodeOnce` only the first rank reads the text encoders. The rest of the pipeline, and
    everything with other strategies, is loaded whole.

    Args:
        model: a name of the zoo, a folder of diffusers, or a hub id.
        *strategies: as for `parallelize`.
        mesh: the ranks; None makes a mesh that gives each strategy its degree, and that `Plan.undo` closes.
        dtype: type of weights and arithmetic, such as ``bfloat16``. Default: the checkpoint's own on a GPU, float32 on
            a CPU.

    Returns:
        The plan. Its `target` is the pipeline, on the rank's device. `Plan.undo` makes the weights whole.

    Raises:
        ArgumentError: the model is unknown, or its files are not complete.
        UnsupportedError: as for `parallelize`, or the folder asks for code of its own.

    Example:
        >>> from partsong import CfgParallel, generate
        >>> with load_pipeline("shapes", CfgParallel()) as plan:  # one rank here; under torchrun each has its part
        ...     image = generate(plan, prompt="a red circle", num_inference_steps=2).images[0]
        >>> image.size
        (64, 64)
    """
    source = find_pipeline(str(model))
    if mesh is not None:
        return load_folder(source.folder, source.pipeline, strategies, mesh, dtype, zoo_name=source.zoo_name)
    mesh = Mesh(**mesh_for(strategies, int(os.environ.get("WORLD_SIZE", "1"))))
    try:
        plan = load_folder(source.folder, source.pipeline, strategies, mesh, dtype, zoo_name=source.zoo_name)
    except BaseException:
        mesh.close()
        raise
    plan.adopt_mesh()
    return plan


def open_plan(job: SamplingJob, mesh: Mesh, pipe: Any = None) -> Plan:
    """Attaches a job's strategies.

    Args:
        job: the job.
        mesh: the ranks.
        pipe: its pipeline if already loaded; None loads it, on each rank only what that rank needs.
    """
    if pipe is not None:
        return parallelize(pipe, *job.strategies, mesh=mesh)
    plan = load_folder(job.folder, job.pipeline, job.strategies, mesh, job.dtype, zoo_name=job.zoo_name)
    plan.target.set_progress_bar_config(**bar_settings("steps", unit="step"))
    return plan


def load_folder(
    folder: Path,
    pipeline: str,
    strategies: Sequence[Strategy],
    mesh: Mesh,
    dtype: str | None = None,
    *,
    zoo_name: str | None = None,
) -> Plan:
    """Loads a pipeline folder as `load_pipeline` does.

    Args:
        folder: a diffusers pipeline folder.
        pipeline: class name of the pipeline.
        strategies: what to attach.
        mesh: the ranks.
        dtype: as for `load_pipeline`.
        zoo_name: name of the zoo model, if it is one.
    """
    index = read_settings(folder, "model_index.json")
    names = [name for name in DENOISERS if (folder / name).is_dir() and (index.get(name) or [None])[0]]
    dtype = dtype or usual_dtype(folder, mesh.device)
    encodes_once = mesh.world_size > 1 and any(isinstance(strategy, EncodeOnce) for strategy in strategies)
    cuts = mesh.world_size > 1 and any(strategy.cuts_weights for strategy in strategies)
    empty = _empty_denoisers(folder, {name: index[name][1] for name in names}) if cuts else {}
    # A pipeline that cannot encode on a single rank is refused below, with all of its parts.
    can_do_without = encodes_once and mesh.rank > 0 and hasattr(pipeline_class(pipeline), "encode_prompt")
    left_out = dict.fromkeys(text_encoders(index)) if can_do_without else {}
    pipe = zoo.complete(zoo_name, read_pipeline(folder, pipeline, dtype, given={**empty, **left_out}))
    plan = parallelize(pipe, *strategies, mesh=mesh)
    try:
        for name, model in empty.items():
            under = next(each for each in plan.denoisers if each.module is model)
            _fill(under, folder / name, getattr(torch, dtype), mesh.device)
        _move(pipe, mesh.device, encodes_once)
    except BaseException:
        plan.abandon()
        plan.undo()
        raise
    return plan


def _empty_denoisers(folder: Path, kinds: Mapping[str, str]) -> dict[str, nn.Module]:
    """Builds the denoisers that will be shared out over ranks, without weights, by the names of their classes."""
    import diffusers  # takes seconds, and processes that only start ranks load this module too

    models = {}
    for name, kind in kinds.items():
        model = empty_model(getattr(diffusers, kind), folder / name)
        # The check of an inferred row compares with the whole model.
        if not adapter_for(model).inferred:
            with WeightFiles(folder / name) as files:
                models |= {name: model} if can_fill(model, files) else {}
    return models


def _fill(under: Denoiser, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Reads this rank's share now, and the rest when the plan is undone."""

    def complete() -> None:
        with WeightFiles(folder) as files:
            fill_model(under.module, None, files, dtype, device)

    with WeightFiles(folder) as files:
        fill_model(under.module, under.shards, files, dtype, device)
    under.hooks.refresh()
    under.hooks.on_remove(complete)


def _move(pipe: Any, device: torch.device, encodes_once: bool) -> None:
    """Moves to the device what is not there yet; text encoders under `EncodeOnce` are moved when they are used."""
    staying = text_encoders(pipe.components) if encodes_once else []
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name not in staying:
            part.to(device)
