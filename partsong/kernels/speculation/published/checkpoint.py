"""Reads the folder of a published drafter: its settings, and its tensors by the names of one layout.

The layouts are those in which the repositories of EAGLE-3 (arXiv 2503.01840), DFlash (arXiv 2602.06036) and DSpark
(arXiv 2607.05147) store them, and that of the library `speculators`, which puts the settings of the layers into
``transformer_layer_config``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partsong.errors import ArgumentError, UnsupportedError
from partsong.model_folders import model_folder, read_settings

__all__ = ["DraftCheckpoint", "read_checkpoint"]

#: How the file of settings says what a drafter is; the more special name stands first.
_KINDS: tuple[Literal["eagle3", "dspark", "dflash"], ...] = ("eagle3", "dspark", "dflash")
#: Settings of layers and of the method may stand in these parts; what stands outside of them counts.
_PARTS = ("transformer_layer_config", "dflash_config", "dspark_config", "eagle_config")
#: What a layer has in every layout.
_LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCheckpoint:
    """Holds a published drafter.

    Attributes:
        kind: how it drafts.
        settings: of its configuration, in one mapping.
        layers: the model's layers whose states it reads: 0 is the embedding, n the output of the n-th layer.
        weights: its tensors by name; its layers are called ``layers.N``.
        tokens: the model's token for each of its own, int64 `[draft vocabulary]`; None where they are the same.
    """

    kind: Literal["eagle3", "dspark", "dflash"]
    settings: Mapping[str, Any]
    layers: tuple[int, ...]
    weights: Mapping[str, Tensor]
    tokens: Tensor | None

    @property
    def num_layers(self) -> int:
        """Counts its layers."""
        return 1 if self.kind == "eagle3" else int(self.settings["num_hidden_layers"])


def read_checkpoint(path: str | Path, model: Any) -> DraftCheckpoint:
    """Reads a published drafter for a model, whose type and device its weights get.

    Args:
        path: a folder or a hub id, with ``config.json`` and safetensors.
        model: what it drafts for; see `DraftTarget`.

    Raises:
        ArgumentError: there is no such folder, a file cannot be read, or a tensor is missing or of a wrong shape.
        UnsupportedError: it is a drafter of another kind, or was made for a model of other sizes.
    """
    folder = model_folder(path)
    config = read_settings(folder)
    kind = _kind_of(config, folder)
    settings = {**{k: v for part in _PARTS for k, v in (config.get(part) or {}).items()}, **config}
    layers = _layers_of(kind, settings, model, folder)
    weights = {_renamed(name): tensor for name, tensor in _tensors(folder)}
    tokens = weights.pop("d2t", None)
    weights.pop("t2d", None)
    moved = {name: tensor.to(model.device, model.dtype) for name, tensor in weights.items()}
    if tokens is not None:  # distances from a token of the drafter's to the model's
        tokens = torch.arange(len(tokens), device=model.device) + tokens.to(model.device, torch.int64)
    read = DraftCheckpoint(kind=kind, settings=settings, layers=layers, weights=moved, tokens=tokens)
    _check(read, model, folder)
    return read


def _kind_of(config: Mapping[str, Any], folder: Path) -> Literal["eagle3", "dspark", "dflash"]:
    stated = [*(config.get("architectures") or ()), config.get("speculators_model_type") or ""]
    for kind in _KINDS:
        if any(kind in str(name).lower() for name in stated):
            return kind
    names = ", ".join(filter(None, map(str, stated))) or "nothing"
    raise UnsupportedError(f"{folder} is no drafter of EAGLE-3, DFlash or DSpark: its configuration names {names}")


def _layers_of(kind: str, settings: Mapping[str, Any], model: Any, folder: Path) -> tuple[int, ...]:
    most = model.layers
    inputs = settings.get("eagle_aux_hidden_state_layer_ids") or settings.get("aux_hidden_state_layer_ids")
    if inputs:
        layers = [int(each) for each in inputs]
    elif kind == "eagle3":
        layers = [2, most // 2, most - 3]
    else:
        outputs = settings.get("target_layer_ids")
        if not outputs:
            raise ArgumentError(f"{folder / 'config.json'} does not say which layers the drafter reads")
        layers = [int(each) + 1 for each in outputs]
    if not all(0 <= each < most for each in layers):
        raise UnsupportedError(
            f"{folder} reads the states before layers {layers} of its model, and this one has {most} layers; give the "
            "drafter of this model"
        )
    return tuple(layers)


def _renamed(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        files = [single.name]
        if not single.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for file in files:
            if Path(file).name != file:
                raise ArgumentError(f"{index} names {file!r}, which does not lie beside it")
            with safe_open(folder / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_tensor(name)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, ArgumentError):
            raise
        pickles = [each.name for each in sorted(folder.glob("*.bin"))[:1]]
        more = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors" if pickles else ""
        raise ArgumentError(f"the weights in {folder} cannot be read: {error}{more}") from error


def _check(read: DraftCheckpoint, model: Any, folder: Path) -> None:
    """Checks that all settings and tensors are there, and fit the model."""
    wanted = ["num_attention_heads", "hidden_size"]
    wanted += [] if read.kind == "eagle3" else ["num_hidden_layers", "mask_token_id"]
    if unset := [name for name in wanted if read.settings.get(name) is None]:
        raise ArgumentError(f"{folder / 'config.json'} does not say {', '.join(unset)}, which {read.kind} needs")
    names = [f"layers.{layer}.{name}.weight" for layer in range(read.num_layers) for name in _LAYER]
    names += ["fc.weight", "norm.weight"]
    names += ["layers.0.hidden_norm.weight", "lm_head.weight"] if read.kind == "eagle3" else ["hidden_norm.weight"]
    if read.kind == "dspark" and int(read.settings.get("markov_rank") or 0):
        names += ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    missing = [name for name in names if name not in read.weights]
    if missing:
        raise ArgumentError(f"{folder} lacks {len(missing)} tensors of a drafter by {read.kind}, {missing[0]} first")
    rows, columns = read.weights["fc.weight"].shape
    if columns != len(read.layers) * model.hidden_size or ("embed_tokens.weight" not in read.weights) * (
        rows - model.hidden_size
    ):
        raise UnsupportedError(
            f"{folder} reads {columns} numbers of {len(read.layers)} layers for a width of {rows}, and the states of "
            f"this model have {model.hidden_size}; give the drafter of this model"
        )
    table, mask = read.weights.get("embed_tokens.weight"), read.settings.get("mask_token_id") or 0
    if mask >= (model.vocab_size if table is None else len(table)):
        raise UnsupportedError(f"{folder} fills blocks with token {mask}, which this model does not know")
    largest = len(read.weights["lm_head.weight"]) - 1 if "lm_head.weight" in read.weights else 0
    if (largest if read.tokens is None else int(read.tokens.max())) >= model.vocab_size:
        raise UnsupportedError(f"{folder} guesses tokens that this model's {model.vocab_size} do not include")
