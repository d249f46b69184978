"""Finds the pipeline folder that ``--model`` names, from small JSON files only; no code of a folder is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.errors import ArgumentError, UnsupportedError
from partsong.jobs.hub import first_line, is_hub_id, why_offline

__all__ = ["PipelineSource", "class_number", "find_pipeline", "read_index"]

#: Libraries whose classes a pipeline folder may name; other classes would be code that comes with the folder.
LIBRARIES = ("diffusers", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSource:
    """Describes a pipeline folder that can be loaded.

    Attributes:
        folder: where it is.
        pipeline: class name of the pipeline.
        denoisers: class names of its transformers or U-Nets.
        index: the folder's ``model_index.json``.
        zoo_name: name of the zoo model, if it is one.
        defaults: arguments of the pipeline's call that the user can override.
    """

    folder: Path
    pipeline: str
    denoisers: tuple[str, ...]
    index: dict[str, Any]
    zoo_name: str | None = None
    defaults: dict[str, Any]


def find_pipeline(name: str) -> PipelineSource:
    """Resolves a zoo name, a local diffusers folder or a hub id.

    Args:
        name: what the user wrote. It is looked for as a folder first, then in the zoo, then on the hub.

    Raises:
        ArgumentError: the model is unknown, not readable or not reachable; says which.
        UnsupportedError: the folder needs code of its own.
    """
    if Path(name).is_dir():
        return _from_folder(Path(name))
    if name in zoo.MODELS:
        row = zoo.MODELS[name]
        if row.kind == "text":
            raise ArgumentError(f"the zoo model {name} writes text; use it with partsong text")
        if not (row.folder / "model_index.json").is_file():
            raise ArgumentError(
                f"the zoo model {name} has no weights in {row.folder}; see recipes/ for how to make them"
            )
        return _from_folder(row.folder, zoo_name=name, defaults=dict(row.defaults))
    if Path(name).exists():
        raise ArgumentError(f"--model {name} is a file; give the pipeline folder that holds model_index.json")
    if is_hub_id(name):
        return _from_hub(name)
    raise ArgumentError(
        f"no model {name!r}: not a folder here, not in the zoo ({', '.join(zoo.MODELS)}), and not a hub id (owner/name)"
    )


def class_number(source: PipelineSource, prompt: str) -> int:
    """Returns the number of a class that is given by its number or by one of its names.

    Raises:
        ArgumentError: the pipeline has no such class.
    """
    labels = source.index.get("id2label") or {}
    if prompt.isdigit():
        return int(prompt)
    for number, names in labels.items():
        if prompt.lower() in (part.strip().lower() for part in str(names).split(",")):
            return int(number)
    raise ArgumentError(f"{source.pipeline} draws classes, and none is called {prompt!r}; give a name or a number")


def _from_folder(folder: Path, zoo_name: str | None = None, defaults: dict[str, Any] | None = None) -> PipelineSource:
    index = read_index(folder)
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise UnsupportedError(f"{folder}/model_index.json must name a pipeline class of diffusers, found {pipeline!r}")
    parts = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[0]}
    for name, (library, kind) in parts.items():
        if library not in LIBRARIES:
            raise UnsupportedError(
                f"part {name} of {folder} is {library}.{kind}; only {' and '.join(LIBRARIES)} are run"
            )
        if not (folder / name).is_dir():
            raise ArgumentError(f"the model folder {folder} is not complete: its part {name} ({kind}) is missing")
    present = [name for name in ("transformer", "transformer_2", "unet") if name in parts]
    for name in present:
        if not any((folder / name).glob("*.safetensors*")):
            raise ArgumentError(
                f"{folder / name} holds no safetensors weights; other formats can run code and are not read"
            )
    return PipelineSource(
        folder=folder,
        pipeline=pipeline,
        denoisers=tuple(str(parts[name][1]) for name in present),
        index=index,
        zoo_name=zoo_name,
        defaults=defaults or {},
    )


def read_index(folder: Path) -> dict[str, Any]:
    """Reads the ``model_index.json`` of a pipeline folder.

    Raises:
        ArgumentError: it is not there or cannot be read.
    """
    path = folder / "model_index.json"
    if not path.is_file():
        raise ArgumentError(f"{folder} is no diffusers pipeline folder: it has no {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ArgumentError(f"{path} holds a {type(values).__name__}, not an object with the pipeline's parts")
    return values


def _from_hub(name: str) -> PipelineSource:
    from huggingface_hub import hf_hub_download

    offline = why_offline(name)
    try:
        # The small file comes first, so that nothing is downloaded for an unsupported model.
        index = Path(hf_hub_download(name, "model_index.json", local_files_only=bool(offline)))
    except Exception as error:
        if offline:
            raise ArgumentError(f"the hub is not reachable ({offline}) and {name} is not in the local cache") from error
        raise ArgumentError(f"{name} has no model_index.json ({first_line(error)})") from error
    pipeline = read_index(index.parent).get("_class_name")
    if not isinstance(pipeline, str):
        raise UnsupportedError(f"{name} asks for pipeline code of its own ({pipeline!r}), which is not run")
    from diffusers import DiffusionPipeline

    try:
        folder = DiffusionPipeline.download(
            name, use_safetensors=True, trust_remote_code=False, local_files_only=bool(offline)
        )
    except Exception as error:
        raise ArgumentError(f"{name} cannot be downloaded ({first_line(error)})") from error
    return _from_folder(Path(folder))
