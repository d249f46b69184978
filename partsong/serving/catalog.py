"""Finds the models that a server is to serve, from small files; nothing heavy is imported for models of the zoo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partsong import zoo
from partsong.errors import ArgumentError, UnsupportedError
from partsong.jobs.pipeline_source import PipelineSource, find_pipeline
from partsong.jobs.usual_strategy import usual_size, usual_strategy
from partsong.serving.ranks.settings import ReplicaSettings
from partsong.serving.services import PictureService

__all__ = ["picture_model", "serves_pictures"]


def serves_pictures(name: str) -> bool:
    """Says whether a model makes pictures or videos, and not text."""
    if name in zoo.MODELS:
        return zoo.MODELS[name].kind != "text"
    folder = Path(name)
    return not folder.is_dir() or (folder / "model_index.json").is_file()


def picture_model(
    name: str, *, nproc: int, strategies: Sequence[str], loras: Mapping[str, Path], **settings: Any
) -> PictureService:
    """Describes how a model of pictures or videos is served.

    Args:
        name: a zoo name, a folder, or a hub id; clients know a folder by its last part.
        nproc: number of ranks.
        strategies: the strategies where a client names none; ``auto`` chooses fitting ones, ``serial`` uses none.
        loras: adapters by the names that clients know them by.
        **settings: further fields of `ReplicaSettings`.

    Raises:
        ArgumentError: the model is not there.
        UnsupportedError: it needs code of its own, or draws classes.
    """
    if name in zoo.MODELS and not (zoo.MODELS[name].pipeline_folder / "model_index.json").is_file():
        raise UnsupportedError(f"{name} draws token by token and not with a pipeline; use partsong image for it")
    source = find_pipeline(name)
    if source.index.get("id2label") is not None:
        raise UnsupportedError(f"{name} draws classes and takes no prompt; use partsong image for it")
    given = ReplicaSettings(
        folder=source.folder,
        pipeline=source.pipeline,
        zoo_name=source.zoo_name,
        defaults=source.defaults,
        loras=dict(loras),
        address="",
        authkey=b"",
        **settings,
    )
    chosen, advice = tuple(strategies), None
    if chosen in ((), ("auto",)):
        chosen, _, advice = usual_strategy(source, nproc, **usual_size(source))
    elif chosen == ("serial",):
        chosen = ()
    elif {"auto", "serial"} & set(chosen):
        raise ArgumentError("--strategy auto and serial stand alone; leave the others out")
    return PictureService(
        name=Path(name).name if source.zoo_name is None and Path(name).is_dir() else name,
        nproc=nproc,
        settings=given,
        kind=_kind(source),
        strategy=chosen,
        advice=advice,
    )


def _kind(source: PipelineSource) -> str:
    if source.zoo_name is not None:
        return zoo.MODELS[source.zoo_name].kind
    import inspect

    from partsong.jobs.pipelines import pipeline_class

    known = inspect.signature(pipeline_class(source.pipeline).__call__).parameters
    return "video" if "num_frames" in known else "image"
