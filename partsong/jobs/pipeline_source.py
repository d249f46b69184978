"""Finds out what ``--model`` means from small JSON files only; nothing is loaded and no code of a folder is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["PipelineSource", "class_number", "find_pipeline"]

#: Libraries whose classes a pipeline folder may name; anything else would be code that comes with the folder.
LIBRARIES = ("diffusers", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSource:
    """A pipeline folder that can be loaded.

    Attributes:
        folder: where it is.
        pipeline: class name of the pipeline.
        denoisers: class names of its transformers or U-Nets.
        index: the folder's ``model_index.json``.
        zoo_name: name of the zoo model, if it is one.
        defaults: arguments its pipeline is called with unless the user says otherwise.
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
        name: what the user wrote. An existing folder comes first, then the zoo, then (with a slash) the hub.

    Raises:
        ArgumentError: unknown, unreadable or not reachable; says which.
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
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")):
        return _from_hub(name)
    raise ArgumentError(
        f"no model {name!r}: not a folder here, not in the zoo ({', '.join(zoo.MODELS)}), and not a hub id (owner/name)"
    )


def class_number(source: PipelineSource, prompt: str) -> int:
    """The class a class-conditional pipeline is asked for, by number or by one of its label's names.

    Raises:
        ArgumentError: no such class.
    """
    labels = source.index.get("id2label") or {}
    if prompt.isdigit():
        return int(prompt)
    for number, names in labels.items():
        if prompt.lower() in (part.strip().lower() for part in str(names).split(",")):
            return int(number)
    raise ArgumentError(f"{source.pipeline} draws classes and has none called {prompt!r}; give a name or a number")


def _from_folder(folder: Path, zoo_name: str | None = None, defaults: dict[str, Any] | None = None) -> PipelineSource:
    index = _read_json(folder, "model_index.json")
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise UnsupportedError(f"{folder}/model_index.json names no pipeline class of diffusers, found {pipeline!r}")
    parts = {name: entry for name, entry in index.items() if isinstance(entry, list) and len(entry) == 2 and entry[0]}
    for name, (library, kind) in parts.items():
        if library not in LIBRARIES:
            raise UnsupportedError(
                f"part {name} of {folder} is {library}.{kind}; only {' and '.join(LIBRARIES)} are run"
            )
        if not (folder / name).is_dir():
            raise ArgumentError(f"the model folder {folder} is not complete: its part {name} ({kind}) is missing")
    denoisers = tuple(str(parts[n][1]) for n in ("transformer", "transformer_2", "unet") if n in parts)
    for name in ("transformer", "transformer_2", "unet"):
        if name in parts and not any((folder / name).glob("*.safetensors*")):
            raise ArgumentError(
                f"{folder / name} holds no safetensors weights; other formats can run code and are not read"
            )
    return PipelineSource(
        folder=folder, pipeline=pipeline, denoisers=denoisers, index=index, zoo_name=zoo_name, defaults=defaults or {}
    )


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        raise ArgumentError(f"{folder} is no diffusers pipeline folder: it has no {name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ArgumentError(f"{path} holds a {type(values).__name__}, not an object with the pipeline's parts")
    return values


def _from_hub(name: str) -> PipelineSource:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    offline = ""
    try:
        HfApi().model_info(name, timeout=10)  # one request: the downloads below would try for half a minute
    except HfHubHTTPError as error:
        raise ArgumentError(f"the hub has no readable model {name} ({_first_line(error)})") from error
    except Exception as error:  # noqa: BLE001 - whatever the HTTP library raises when there is no network
        offline = _first_line(error)
    try:
        # The small file first: an unsupported model costs no download.
        index = Path(hf_hub_download(name, "model_index.json", local_files_only=bool(offline)))
    except Exception as error:
        found = f"the hub is not reachable ({offline}) and {name} is not in the local cache" if offline else ""
        raise ArgumentError(found or f"{name} has no model_index.json ({_first_line(error)})") from error
    pipeline = _read_json(index.parent, "model_index.json").get("_class_name")
    if not isinstance(pipeline, str):
        raise UnsupportedError(f"{name} asks for pipeline code of its own ({pipeline!r}), which is not run")
    from diffusers import DiffusionPipeline

    try:
        folder = DiffusionPipeline.download(
            name, use_safetensors=True, trust_remote_code=False, local_files_only=bool(offline)
        )
    except Exception as error:
        raise ArgumentError(f"{name} cannot be downloaded ({_first_line(error)})") from error
    return _from_folder(Path(folder))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
