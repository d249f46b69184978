"""Finds out what ``--model`` of text commands means from small files only; no weights are loaded, no code is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.model_folders import model_folder, read_settings

__all__ = ["TextSource", "find_text_model"]

#: Any of these is a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


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
    folder = model_folder(name)
    _check_folder(folder, adapter)
    of_zoo = name in zoo.MODELS and folder == zoo.MODELS[name].folder
    return TextSource(folder=folder, zoo_name=name if of_zoo else None)


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
