"""Builds published models without their weights, from the rows of ``models.json``."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from partsong.errors import ArgumentError
from partsong.knobs import did_you_mean
from partsong.model_folders import read_settings
from partsong.planner.calls import CALLS, Call
from partsong.planner.subject import Autoencoder, Encoder, Subject

__all__ = ["MODELS", "ModelRow", "subject_in", "subject_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoderRow:
    """Describes an autoencoder whose weights need not be at hand.

    Attributes:
        kind: its class.
        channels: of the latents that it decodes.
        clip: latent frames of a short clip; None where it decodes pictures.
        config: values that differ from the defaults of its class.
    """

    kind: str
    channels: int
    clip: int | None = None
    config: Mapping[str, Any]


#: Fields of a row that describe the model built from it as well.
_OF_SUBJECT = (
    "name", "steps", "height", "width", "frames", "multiple", "frame_multiple", "branches", "joined", "encoders",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """Describes a pipeline whose weights need not be at hand.

    Attributes:
        name: what `recommend` and the command line call it.
        checkpoint: where its configuration comes from.
        pipeline: the class of the pipeline.
        denoiser: the class of its denoiser.
        config: values that differ from the defaults of that class.
        call: the arguments of one call for a size.
        steps: as its authors advise.
        height: pixels where nothing else is asked.
        width: pixels where nothing else is asked.
        frames: of a video; 1 where it makes pictures.
        multiple: pixels of which height and width are multiples.
        frame_multiple: a video has a multiple of this many frames, plus one; 1 where any number will do.
        branches: samples of a step that guidance asks for; 1 where the model was distilled to need one.
        joined: whether the branches are one call.
        coder: its autoencoder.
        encoders: its text encoders.
    """

    name: str
    checkpoint: str
    pipeline: str
    denoiser: str
    config: Mapping[str, Any]
    call: Call
    steps: int
    height: int = 1024
    width: int = 1024
    frames: int = 1
    multiple: int = 16
    frame_multiple: int = 1
    branches: int = 1
    joined: bool = True
    coder: CoderRow
    encoders: tuple[Encoder, ...]

    def built(self) -> Subject:
        """Describes the model in half precision; its parts are built when they are first needed."""
        build = functools.cache(lambda: _empty(self.denoiser, self.config))
        coder = self.coder
        return Subject(
            **{name: getattr(self, name) for name in _OF_SUBJECT},
            build=build,
            call=lambda size: self.call(size, cast("Any", build().config)),
            coder=Autoencoder(lambda: _empty(coder.kind, coder.config), coder.channels, coder.clip),
            settings=f"{self.denoiser} {json.dumps(dict(self.config), sort_keys=True, default=repr)}",
            uniform=True,  # tests trace every row both ways
        )


def _empty(kind: str, config: Mapping[str, Any]) -> nn.Module:
    import diffusers  # takes seconds

    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16)
    return model.eval()


def _rows(data: Mapping[str, Any]) -> dict[str, ModelRow]:
    """Reads the table: every row names its autoencoder and its text encoders, which several share."""
    parameters, coders = data["encoders"], data["coders"]
    rows = (
        ModelRow(
            **{
                **row,
                "config": _settings(row.get("config", {})),
                "call": CALLS[row["call"]],
                "coder": CoderRow(**{**(coder := coders[row["coder"]]), "config": _settings(coder.get("config", {}))}),
                "encoders": tuple(
                    Encoder(name=name, parameters=parameters[name], tokens=tokens)
                    for name, tokens in row["encoders"].items()
                ),
            }
        )
        for row in data["models"]
    )
    return {row.name: row for row in rows}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as a model's class has them, with tuples for JSON's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}


#: The published models by name, older and smaller ones first.
MODELS: Mapping[str, ModelRow] = _rows(json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=4)
def subject_named(name: str) -> Subject:
    """Describes a published model in half precision; it is built, without weights, where it has to be traced.

    Raises:
        ArgumentError: an unknown name; lists the known ones.
    """
    if name not in MODELS:
        known = f"the known ones are {', '.join(MODELS)}{did_you_mean(name, MODELS)}"
        raise ArgumentError(f"no model {name!r} is known to the planner; {known}")
    return replace(MODELS[name].built(), published=name)


def subject_in(folder: Path, pipeline: str) -> Subject:
    """Describes the model of a folder in half precision, without its weights.

    Args:
        folder: of a diffusers pipeline.
        pipeline: its class, one of those of `MODELS`.
    """
    row = next(row for row in MODELS.values() if row.pipeline == pipeline)
    part = "unet" if (folder / "unet").is_dir() else "transformer"
    config, coder = (read_settings(folder / name) for name in (part, "vae"))
    own = replace(row.coder, kind=coder["_class_name"], config=_public(coder))
    return replace(row, name=folder.name, denoiser=config["_class_name"], config=_public(config), coder=own).built()


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}
