"""Reads a checkpoint's safetensors shard by shard into a transformers module, and accounts for every tensor."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.loading.fill import local_shape, placed_like
from partsong.parallel.loading.text_share import TextShare
from partsong.parallel.loading.weight_files import BYTES_UNTIL_CLOSED
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.text.plan import TextPlan
from partsong.samplers.text.rekey import Rekeying, WeightPlace
from partsong.samplers.text.runner import GROUPED

__all__ = ["load_rekeyed", "load_stock", "stacked_experts", "make_runnable", "weight_files"]

#: An expert's own tensor: the layer, the number of the expert, and what it does.
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
#: Which of the stacked weights it goes to, and which half of that.
_HALVES = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}

#: Bytes of a number, at most.
_WIDEST = 8
#: Most names in a message; the rest are counted.
_LISTED = 6

#: Tensors of checkpoints pre-trained with a second head, which a masked-LM model has no use for.
_SECOND_HEADS = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")


def load_rekeyed(
    folder: Path,
    rekeying: Rekeying,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    share: TextShare | None = None,
) -> PreTrainedModel:
    """Loads a public checkpoint's weights into a stock module.

    One tensor of the files is in memory at a time besides the module itself.

    Args:
        folder: with ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        rekeying: where each tensor goes.
        dtype: that of the parameters. Default: that of the checkpoint's first tensor.
        device: default: the CPU.
        share: attaches a plan to the module before its weights are read; then this rank's parts are read only.

    Returns:
        The module, in eval mode, without gradients.

    Raises:
        ArgumentError: no safetensors, or tensors that are missing, unexpected, twice there or of a wrong shape.
    """
    files = weight_files(folder)
    shapes = _headers(files, rekeying)
    with init_empty_weights(include_buffers=False), no_init_weights():
        module = rekeying.model_class(rekeying.config)
    _check_shapes(shapes, rekeying, module)
    target = torch.device(device or "cpu")
    module = module.eval().requires_grad_(False)
    plan = None if share is None else share(module)
    for file in files:
        for name, whole in _tensors(file, str(target)):
            for place in rekeying.places[name]:
                piece = None if plan is None else _piece_at(plan, module, place.target)
                if piece is not None and (kept := _kept(place, piece)) is not None:
                    place, piece = kept
                elif piece is not None:
                    continue
                read, put = _read(whole, place, piece)
                dtype = dtype or read.dtype
                _put(module, put, read, dtype, target)
    _put_nothing(module, dtype or torch.float32, target)
    module.tie_weights()
    # What the module computes by itself, such as rotary frequencies, was made on the CPU.
    nn.Module.to(module, target)
    return make_runnable(module)


def weight_files(folder: Path) -> list[Path]:
    """Lists the safetensors files of a checkpoint folder.

    Raises:
        ArgumentError: no such files, or an index that names a file that is missing or lies elsewhere.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = [p.name for p in sorted(folder.glob("*.bin"))[:1]]
        more = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors" if pickles else ""
        raise ArgumentError(f"{folder} holds neither {single.name} nor {index.name}{more}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(f"{index} is not an index of safetensors files: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise ArgumentError(f"{index} names {name!r}, and there is no such file beside it")
    return [folder / name for name in names]


def _tensors(file: Path, device: str) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a file as slices, each to be read before the next one.

    A file is mapped into memory, and what was read of it counts as this process's memory until it is closed: it is
    opened anew again and again.
    """
    with safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
    while names:
        with safe_open(file, framework="pt", device=device) as opened:
            mapped = 0
            while names and mapped < BYTES_UNTIL_CLOSED:
                whole = opened.get_slice(name := names.pop(0))
                yield name, whole
                mapped += math.prod(whole.get_shape()) * _WIDEST
                del whole


def _headers(files: list[Path], rekeying: Rekeying) -> dict[str, tuple[int, ...]]:
    """Reads the shape of every tensor of the files, which must be exactly those expected."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                in_file = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ArgumentError(f"{file} is not a safetensors file: {error}") from error
        twice = shapes.keys() & in_file.keys()
        if twice:
            raise ArgumentError(f"{file.parent} holds tensors twice: {_list(twice)}")
        shapes |= in_file
    missing, unexpected = rekeying.places.keys() - shapes.keys(), shapes.keys() - rekeying.places.keys()
    if missing or unexpected:
        raise ArgumentError(
            f"the tensors in {files[0].parent} are not those of {rekeying.model_class.__name__}'s family: "
            f"{len(missing)} missing ({_list(missing)}), {len(unexpected)} unexpected ({_list(unexpected)})"
        )
    return shapes


def _list(names: Any) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_LISTED]) + (f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else "")


def _check_shapes(shapes: dict[str, tuple[int, ...]], rekeying: Rekeying, module: nn.Module) -> None:
    targets = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    meant = {place.target for places in rekeying.places.values() for place in places}.union(rekeying.zero)
    left = module.state_dict().keys() - meant - ({"lm_head.weight"} if rekeying.config.tie_word_embeddings else set())
    assert not left, f"no tensor of the checkpoint is meant for {_list(left)}"
    for name, places in rekeying.places.items():
        for place in places:
            hole = targets[place.target]
            # An index into the target, on a tensor without values.
            hole = torch.empty(hole.shape, device="meta")[place.index] if place.index else hole
            # The parts of a cut tensor fit by construction; the whole must be checked.
            whole = max((p.source[1] for p in places if p.source), default=hole.shape[0])
            if shapes[name] != (whole, *hole.shape[1:]):
                raise ArgumentError(
                    f"{name} is {list(shapes[name])} in the checkpoint, and the configuration makes it "
                    f"{[whole, *hole.shape[1:]]}"
                )


def _put(module: nn.Module, place: WeightPlace, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    path, _, name = place.target.rpartition(".")
    owner = module.get_submodule(path)
    if name in owner._buffers:
        owner._buffers[name] = tensor.to(device=device, dtype=owner.get_buffer(name).dtype, copy=True)
        return
    held = owner.get_parameter(name)
    if not place.index:
        owner._parameters[name] = nn.Parameter(placed_like(held, tensor.to(dtype)), requires_grad=False)
        return
    if held.is_meta:
        room = torch.empty(local_shape(held), dtype=dtype, device=device)
        held = owner._parameters[name] = nn.Parameter(placed_like(held, room), requires_grad=False)
    data: Any = held.data
    data = data.to_local() if isinstance(data, DTensor) else data
    data[place.index] = tensor.to(dtype)


def _put_nothing(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Fills in the shares that have no rows on this rank."""
    for part in module.modules():
        for name, held in part.named_parameters(recurse=False):
            if held.is_meta and isinstance(held, DTensor) and not held.to_local().numel():
                nothing = torch.empty(local_shape(held), dtype=dtype, device=device)
                part._parameters[name] = nn.Parameter(placed_like(held, nothing), requires_grad=False)


def _piece_at(plan: TextPlan, module: nn.Module, target: str) -> WeightPiece | None:
    path, _, name = target.rpartition(".")
    return plan.piece_of(module.get_submodule(path), name)


def _kept(place: WeightPlace, piece: WeightPiece) -> tuple[WeightPlace, WeightPiece | None] | None:
    """Says where a tensor goes in this rank's weight, and which part of it; None where it goes nowhere.

    A tensor of its own for each expert goes to one number of the dim that may be cut.
    """
    if piece.is_nothing:
        return None
    number = place.index[piece.dim] if len(place.index) > piece.dim else None
    if not isinstance(number, int):
        return place, piece
    held = [each for start, count in piece.runs for each in range(start, start + count)]
    if number not in held:
        return None
    index = (*place.index[: piece.dim], held.index(number), *place.index[piece.dim + 1 :])
    return replace(place, index=index), None


def _read(whole: Any, place: WeightPlace, piece: WeightPiece | None) -> tuple[Tensor, WeightPlace]:
    """Reads the part of a file's tensor that goes to a place: all that belongs there, or this rank's piece of it.

    Args:
        whole: a slice of safetensors.
        place: where the tensor goes in the whole weight.
        piece: the part of that weight that this rank holds; None where it holds all.

    Returns:
        What was read, and where it goes in this rank's weight.
    """
    first, last = place.source or (0, (whole.get_shape() or [0])[0])
    if piece is None:
        # A part keeps the whole tensor of the file alive unless it is copied out.
        return (whole[...] if place.source is None else whole[first:last].clone()), place
    # A number in the index takes a dim of the weight away, and a slice leaves it.
    dim = piece.dim - sum(isinstance(each, int) for each in place.index[: piece.dim])
    stretch = place.index[piece.dim] if len(place.index) > piece.dim else None
    begin, end = (stretch.start or 0, stretch.stop) if isinstance(stretch, slice) else (0, sys.maxsize)
    runs, before, put = list[tuple[int, int]](), 0, 0
    for start, count in piece.runs:
        low, high = max(start, begin), min(start + count, end)
        if low < high:
            put = put if runs else before + low - start
            runs.append((low - begin, high - begin))
        before += count
    if dim == 0:
        parts = [whole[first + low : first + high] for low, high in runs]
    else:
        parts = [whole[(slice(first, last), *(slice(None),) * (dim - 1), slice(low, high))] for low, high in runs]
    read = torch.cat(parts, dim)
    if isinstance(stretch, slice):
        index = (*place.index[: piece.dim], slice(put, put + read.shape[dim]), *place.index[piece.dim + 1 :])
        place = replace(place, index=index)
    return read, place


def stacked_experts(folder: Path) -> Rekeying | None:
    """Says where each tensor of a checkpoint goes; None where its experts are not the only ones with other names.

    Args:
        folder: with ``config.json`` and safetensors.
    """
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with init_empty_weights():
        module = kind(config)
    shapes = {name: weight.shape for name, weight in module.state_dict().items()}
    places = {name: (_place(name, shapes),) for file in weight_files(folder) for name in _names(file)}
    tied = {"lm_head.weight"} if config.get_text_config().tie_word_embeddings else set[str]()
    if {place.target for (place,) in places.values()} != shapes.keys() - tied:
        return None
    return Rekeying(model_class=kind, config=config, places=places)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _place(name: str, shapes: Any) -> WeightPlace:
    ours = name.replace(".block_sparse_moe.", ".mlp.")
    if (one := _EXPERT.fullmatch(ours)) is None:
        return WeightPlace(target=ours)
    weight, half = _HALVES[one[3]]
    target, number = one[1] + weight, int(one[2])
    if half is None or target not in shapes:
        return WeightPlace(target=target, index=(number,))
    width = shapes[target][1] // 2
    return WeightPlace(target=target, index=(number, slice(half * width, (half + 1) * width)))


def load_stock(
    folder: Path, *, masked_lm: bool, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> PreTrainedModel:
    """Loads a checkpoint of a native class of transformers, and accounts for every tensor.

    Args:
        folder: with ``config.json`` and safetensors.
        masked_lm: it has a masked-LM head.
        dtype: default: the checkpoint's.
        device: default: the CPU.

    Raises:
        ArgumentError: transformers cannot load it, or tensors are missing or unexpected.
        UnsupportedError: transformers has no native class for it.
    """
    weight_files(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    auto: Any = AutoModelForMaskedLM if masked_lm else AutoModelForCausalLM
    auto = AutoModelForImageTextToText if config.get("model_type") == "diffusion_gemma" else auto
    try:
        module, info = auto.from_pretrained(
            folder,
            dtype=dtype or "auto",
            device_map={"": str(device or "cpu")},
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (KeyError, ValueError) as error:
        raise UnsupportedError(f"transformers has no class of its own for {folder}: {error}") from error
    except OSError as error:
        raise ArgumentError(f"transformers cannot load {folder}: {error}") from error
    unexpected = [n for n in info["unexpected_keys"] if not n.startswith(_SECOND_HEADS)]
    if info["missing_keys"] or unexpected or info["mismatched_keys"]:
        raise ArgumentError(
            f"the tensors in {folder} are not those of {type(module).__name__}: missing "
            f"({_list(info['missing_keys'])}), unexpected ({_list(unexpected)}), "
            f"of another shape ({_list(str(k) for k in info['mismatched_keys'])})"
        )
    return make_runnable(module.eval())


def make_runnable(module: PreTrainedModel) -> PreTrainedModel:
    """Switches experts in float64 away from the grouped product that transformers prefers: it has no float64."""
    if module.dtype is torch.float64 and getattr(module.config, "_experts_implementation", None) == GROUPED:
        module.set_experts_implementation("eager")
    return module
