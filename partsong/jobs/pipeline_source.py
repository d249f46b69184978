"""Finds the pipeline folder that ``--model`` names, from small JSON files only; no code of a folder is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.errors import ArgumentError, UnsupportedError
from partsong.model_folders import DENOISERS, model_folder, read_settings, text_encoders

__all__ = ["PipelineSource", "class_number", "encoder_bytes", "find_pipeline"]

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
        name: what the user wrote. It is looked up as a folder first, then in the zoo, then on the hub.

    Raises:
        ArgumentError: the model is unknown, not readable or not reachable; says which.
        UnsupportedError: the folder needs code of its own.
    """
    based = {row.name: partial(Path, row.pipeline_folder) for row in zoo.MODELS.values() if row.base is not None}
    folder = model_folder(name, "model_index.json", others=based, download=_download)
    if name in zoo.MODELS and folder == zoo.MODELS[name].pipeline_folder:
        return _from_folder(folder, zoo_name=name, defaults=dict(zoo.MODELS[name].defaults))
    return _from_folder(folder)


def encoder_bytes(source: PipelineSource) -> int:
    """Returns the bytes of the weights of all text encoders."""
    names = text_encoders(source.index)
    return sum(file.stat().st_size for name in names for file in (source.folder / name).glob("*.safetensors"))


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
    index, pipeline = _read_index(folder)
    parts = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[0]}
    for name, (library, kind) in parts.items():
        if library not in LIBRARIES:
            raise UnsupportedError(
                f"part {name} of {folder} is {library}.{kind}; only {' and '.join(LIBRARIES)} are run"
            )
        if not (folder / name).is_dir():
            raise ArgumentError(f"the model folder {folder} is not complete: its part {name} ({kind}) is missing")
    present = [name for name in DENOISERS if name in parts]
    for name in present:
        if not any((folder / name).glob("*.safetensors*")):
            raise ArgumentError(
                f"{folder / name} holds no safetensors weights; other formats can run code and are not read"
            )
    denoisers = tuple(str(parts[name][1]) for name in present)
    return PipelineSource(
        folder=folder, pipeline=pipeline, denoisers=denoisers, index=index, zoo_name=zoo_name, defaults=defaults or {}
    )


def _read_index(folder: Path) -> tuple[dict[str, Any], str]:
    """Reads ``model_index.json`` and the name of the pipeline's class in it."""
    index = read_settings(folder, "model_index.json")
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise UnsupportedError(f"{folder}/model_index.json must name a pipeline class of diffusers, found {pipeline!r}")
    return index, pipeline


def _download(name: str, offline: bool) -> Path:
    from diffusers import DiffusionPipeline
    from huggingface_hub import hf_hub_download

    # The small file comes first, so nothing else is downloaded for a pipeline with code of its own.
    _read_index(Path(hf_hub_download(name, "model_index.json", local_files_only=offline)).parent)
    return Path(
        DiffusionPipeline.download(name, use_safetensors=True, trust_remote_code=False, local_files_only=offline)
    )
