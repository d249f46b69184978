"""Finds the folder that ``--model`` of text and tiles commands names, from small files only; no code is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.model_folders import model_folder, read_settings

__all__ = ["FolderSource", "find_text_model", "find_tiles"]

#: A folder with any of these files has a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
#: The folder of the picture tokenizer inside that of a model of picture tokens.
_PICTURES = "pictures"


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSource:
    """Names the folder of a model that is not a pipeline.

    Attributes:
        folder: where it is.
        zoo_name: name of the zoo model, if it is one.
    """

    folder: Path
    zoo_name: str | None = None


def find_text_model(name: str, adapter: str | None = None) -> FolderSource:
    """Resolves a zoo name, a local transformers folder or a hub id, and checks that its family can be decoded.

    Args:
        name: what the user wrote. It is looked up as a folder first, then in the zoo, then on the hub; SmolLM2 from its
            package has the name that thinking gives it.
        adapter: as given by ``--adapter``.

    Raises:
        ArgumentError: the model is unknown, incomplete or not reachable, or there is no such adapter; says which.
        UnsupportedError: the family of the model is not recognised.
    """
    from partsong.reasoning.local import smollm2

    folder = model_folder(name, others={smollm2.NAME: smollm2.folder})
    _check_folder(folder, adapter)
    of_zoo = name in zoo.MODELS and folder == zoo.MODELS[name].folder
    return FolderSource(folder=folder, zoo_name=name if of_zoo else None)


def _check_folder(folder: Path, adapter: str | None) -> None:
    settings = read_settings(folder)
    if not any(folder.glob("*.safetensors*")):
        raise ArgumentError(f"{folder} holds no safetensors weights; other formats can run code and are not read")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ArgumentError(
            f"{folder} has no tokenizer ({', '.join(TOKENIZERS)}); put the model's own beside its weights"
        )
    from partsong.samplers.text.families import adapter_of

    adapter_of(settings, adapter)


def find_tiles(name: str) -> FolderSource | None:
    """Returns the folder of a model of picture tokens, or None if the name belongs to another kind of model.

    Args:
        name: what the user wrote: a local folder, or a model of the zoo.
    """
    folder = Path(name).expanduser()
    own = zoo.MODELS[name].folder if name in zoo.MODELS and not folder.is_dir() else None
    folder = own or folder
    if not (folder / "config.json").is_file() or not (folder / _PICTURES).is_dir():
        return None
    return FolderSource(folder=folder, zoo_name=None if own is None else name)
