"""Finds the checkpoint folder that ``--model`` of text commands names, from small files only; no code is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.jobs.hub import first_line, is_hub_id, why_offline

__all__ = ["TextSource", "find_text_model"]

#: A folder with any of these files has a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
#: Files to fetch from a hub repository: weights, configurations and tokenizers, but no code and no pickles.
FETCHED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Names a checkpoint folder with a tokenizer.

    Attributes:
        folder: where it is.
        zoo_name: name of the zoo model, if it is one.
    """

    folder: Path
    zoo_name: str | None = None


def find_text_model(name: str, adapter: str | None = None) -> TextSource:
    """Resolves a zoo name, a local transformers folder or a hub id, and checks that its family can be decoded.

    Args:
        name: what the user wrote. It is looked for as a folder first, then in the zoo, then on the hub.
        adapter: as given by ``--adapter``.

    Raises:
        ArgumentError: the model is unknown, incomplete or not reachable, or there is no such adapter; says which.
        UnsupportedError: the family of the model is not recognised.
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
    if is_hub_id(name):
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
    from huggingface_hub import snapshot_download

    offline = why_offline(name)
    try:
        return Path(snapshot_download(name, allow_patterns=FETCHED, local_files_only=bool(offline)))
    except Exception as error:
        if offline:
            raise ArgumentError(f"the hub is not reachable ({offline}) and {name} is not in the local cache") from error
        raise ArgumentError(f"{name} cannot be downloaded ({first_line(error)})") from error
