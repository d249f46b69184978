"""Finds the folder of a model of picture tokens that ``--model`` names, from the names of its files; loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partsong import zoo

__all__ = ["TilesSource", "find_tiles"]

#: The folder of the picture tokenizer inside the model's.
_PICTURES = "pictures"


@dataclass(frozen=True, kw_only=True, slots=True)
class TilesSource:
    """Names a folder with a model of picture tokens.

    Attributes:
        folder: where it is.
        zoo_name: name of the zoo model, if it is one.
    """

    folder: Path
    zoo_name: str | None = None


def find_tiles(name: str) -> TilesSource | None:
    """Returns the folder of a model of picture tokens, or None if the name belongs to another kind of model.

    Args:
        name: what the user wrote: a local folder, or a model of the zoo.
    """
    folder = Path(name).expanduser()
    own = zoo.MODELS[name].folder if name in zoo.MODELS and not folder.is_dir() else None
    folder = own or folder
    if not (folder / "config.json").is_file() or not (folder / _PICTURES).is_dir():
        return None
    return TilesSource(folder=folder, zoo_name=None if own is None else name)
