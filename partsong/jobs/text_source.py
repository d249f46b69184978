"""Finds out what ``--model`` of text commands means from small files only; no weights are loaded, no code is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partsong import zoo
from partsong.errors import ArgumentError

__all__ = ["TextSource", "find_text_model"]

#: Any of these is a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
#: What is fetched of a hub repository: weights, configurations and tokenizers, no code and no pickles.
FETCHED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """A checkpoint folder with a tokenizer.

    Attributes:
        folder: where it is.
        zoo_name: name of the zoo model, if it is one.
    """

    folder: Path
    zoo_name: str | None = None


def find_text_model(name: str, adapter: str | None = None) -> TextSource:
    """Resolves a zoo name, a local transformers folder or a hub id, and checks that it is known how to decode it.

    Args:
        name: what the user wrote. An existing folder comes first, then the zoo, then (with a slash) the hub.
        adapter: ``--adapter``.

    Raises:
        ArgumentError: unknown, incomplete or not reachable; says which. An adapter nobody has.
        UnsupportedError: a family that is not recognised.
    """
    source = _find(name)
    _check_folder(source.folder, adapter)
    return source


def _find(name: str) -> TextSource:
    if Path(name).is_dir():
        return TextSource(folder=Path(name))
    texts = ", ".join(row.name for row in zoo.MODELS.values() if row.kind == "text")
    if name in zoo.MODELS:
        row = zoo.MODELS[name]
        if row.kind != "text":
            raise ArgumentError(f"the zoo model {name} makes {row.kind}s; its text models are {texts}")
        if not (row.folder / "config.json").is_file():
            raise ArgumentError(f"the zoo model {name} has no weights in {row.folder}; make them with {row.recipe}")
        return TextSource(folder=row.folder, zoo_name=name)
    if Path(name).exists():
        raise ArgumentError(f"--model {name} is a file; give the folder that holds config.json")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/")):
        return TextSource(folder=_from_hub(name))
    raise ArgumentError(
        f"no model {name!r}: not a folder here, not a text model of the zoo ({texts}), and not a hub id (owner/name)"
    )


def _check_folder(folder: Path, adapter: str | None) -> None:
    if not (folder / "config.json").is_file():
        index = (folder / "model_index.json").is_file()
        hint = "; it is a pipeline for partsong image or video" if index else ""
        raise ArgumentError(f"{folder} is no transformers checkpoint: it has no config.json{hint}")
    if not any(folder.glob("*.safetensors*")):
        raise ArgumentError(f"{folder} holds no safetensors weights; other formats can run code and are not read")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ArgumentError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZERS)}); put the model's own beside its weights"
        )
    from partsong.samplers.text.families import adapter_of
    from partsong.samplers.text.loading import read_config

    adapter_of(read_config(folder), adapter)


def _from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    offline = ""
    try:
        HfApi().model_info(name, timeout=10)  # one request: the download below would try for half a minute
    except HfHubHTTPError as error:
        raise ArgumentError(f"the hub has no readable model {name} ({_first_line(error)})") from error
    except Exception as error:  # noqa: BLE001 - whatever the HTTP library raises when there is no network
        offline = _first_line(error)
    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED, local_files_only=bool(offline)))
    except Exception as error:
        found = f"the hub is not reachable ({offline}) and {name} is not in the local cache" if offline else ""
        raise ArgumentError(found or f"{name} cannot be downloaded ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
