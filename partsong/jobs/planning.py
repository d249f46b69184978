"""Finds the model to plan for, and writes the commands that carry the plan out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.accelerator import devices
from partsong.calibration_files import not_measured
from partsong.errors import ArgumentError
from partsong.foreign_messages import quiet_libraries
from partsong.knobs import format_knobs
from partsong.model_folders import read_settings
from partsong.parallel.strategy import Strategy
from partsong.planner.calibration import find_calibration
from partsong.planner.choice import Advice
from partsong.planner.devices import DEVICES, USUAL_LINK
from partsong.planner.hardware import Machine
from partsong.planner.machines import machine_named
from partsong.planner.models import MODELS, subject_in, subject_named
from partsong.planner.pipeline import subject_of
from partsong.planner.subject import Subject
from partsong.samplers.registry import parse_strategy, strategies

__all__ = ["machine_here", "paste", "paste_text", "subject_for", "text_model_for"]

#: A folder with more bytes of weights than this is planned from its settings only.
_SMALL = 2e9


def subject_for(model: str) -> tuple[Subject, str]:
    """Finds a model by the planner's name, a zoo name, or a folder.

    Args:
        model: what the user wrote.

    Returns:
        The model, and what `from_pretrained` takes for it.

    Raises:
        ArgumentError: the name is unknown; lists the known ones.
    """
    if model in MODELS:
        return subject_named(model), MODELS[model].checkpoint
    folder = zoo.MODELS[model].folder if model in zoo.MODELS else Path(model)
    if not (folder / "model_index.json").is_file():
        by_checkpoint = {row.checkpoint: row.name for row in MODELS.values()}
        return subject_named(by_checkpoint.get(model, model)), model
    kind = read_settings(folder, "model_index.json")["_class_name"]
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if weights > _SMALL and any(row.pipeline == kind for row in MODELS.values()):
        return subject_in(folder, kind), str(folder)
    from diffusers import DiffusionPipeline

    quiet_libraries()
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return subject_of(pipe, **(zoo.MODELS[model].defaults if model in zoo.MODELS else {})), str(model)


def text_model_for(model: str) -> Any | None:
    """Builds a language model without weights, for a name of the zoo or a folder; None where it is no language model.

    Raises:
        UnsupportedError: transformers has no causal class for it.
    """
    folder = zoo.MODELS[model].folder if model in zoo.MODELS else Path(model)
    if model in MODELS or (folder / "model_index.json").is_file() or not (folder / "config.json").is_file():
        return None
    if "vocab_size" not in read_settings(folder):
        return None  # one model of a pipeline
    from partsong.samplers.text.loading import empty_text_model

    return empty_text_model(folder)


def paste_text(name: str, strategy: str, ranks: int) -> list[str]:
    """Writes the command line and the lines of Python that carry a plan for a language model out.

    Args:
        name: of the model.
        strategy: as the command line writes it; ``serial`` for one device.
        ranks: how many share it.
    """
    command = f"partsong text PROMPT --model {name}"
    if strategy == "serial":
        return [command]
    kind = type(parse_strategy(strategy)).__name__
    lines = [
        f"from partsong import {kind}, decode, load_text_model  # in a program under torchrun",
        f'model = load_text_model("{name}", strategies=[{kind}()])',
        "with model.plan:",
        "    decoded = decode(model, [PROMPT])",
    ]
    return [f"{command} --nproc {ranks} --strategy {strategy}", "\n".join(lines)]


def machine_here(ranks: int) -> Machine:
    """Describes this machine from its measurements, or from public figures of its GPUs.

    Args:
        ranks: number of ranks to plan for.

    Raises:
        ArgumentError: it was not measured, and no public figures are known.
    """
    if (measured := find_calibration(ranks)) is not None:
        return measured.machine(ranks)
    name = next(iter(devices()), ("", 0))[0].lower()
    if (known := next((device for device in DEVICES if re.search(rf"\b{device}\b", name)), None)) is None:
        raise ArgumentError(not_measured(ranks))
    return machine_named(f"{ranks}x{known}", USUAL_LINK.get(known, "pcie4"))


def paste(name: str, advice: Advice, subject: Subject, **asked: Any) -> list[str]:
    """Writes the command line and the lines of Python for the first of the mixes; on several nodes, for each of them.

    Args:
        name: what `from_pretrained` takes.
        advice: the plan.
        subject: its model.
        **asked: sizes and steps that were asked for; None for those that were not.
    """
    best, ranks = advice.choice, advice.machine.ranks
    sizes = {key: asked[key] for key in ("height", "width", "frames", "steps") if asked.get(key) is not None}
    nodes = ranks // advice.machine.per_node if best.strategies else 1
    command = f"partsong {'video' if subject.frames > 1 else 'image'} PROMPT --model {name}"
    if nodes > 1:
        each = f"--nnodes {nodes} --nproc-per-node {advice.machine.per_node}"
        command = f"torchrun {each} --rdzv-backend c10d --rdzv-endpoint FIRST_BOX:29500 -m {command}"
    else:
        command += f" --nproc {ranks if best.strategies else 1}"
    command += "".join(f" --strategy {format_knobs(strategy, strategies())}" for strategy in best.strategies)
    command += "".join(f" --{key} {value}" for key, value in sizes.items())
    names = {"frames": "num_frames", "steps": "num_inference_steps"}
    more = "".join(f", {names.get(key, key)}={value}" for key, value in sizes.items())
    output = "video" if subject.frames > 1 else "images"
    mix = ", ".join(map(_written, best.strategies))
    kinds = ", ".join(dict.fromkeys(type(strategy).__name__ for strategy in best.strategies))
    if not best.strategies:
        return [command]
    lines = [
        f"from partsong import {kinds}, generate, load_pipeline  # in a program under torchrun",
        f'with load_pipeline("{name}", {mix}) as plan:',
        f'    {output} = generate(plan, prompt="PROMPT"{more})',
    ]
    return [command, "\n".join(lines)]


def _written(strategy: Strategy) -> str:
    """Writes a strategy as a Python expression, with the knobs that differ from their defaults."""
    _, _, knobs = format_knobs(strategy, strategies()).partition(":")
    given = [part.split("=") for part in knobs.split(",") if part]
    values = (f"{key}={value if value.replace('.', '', 1).isdigit() else repr(value)}" for key, value in given)
    return f"{type(strategy).__name__}({', '.join(values)})"
