"""Reads a checkpoint's safetensors shard by shard into a transformers module, and accounts for every tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM, PreTrainedModel
from transformers.initialization import no_init_weights

from partsong.errors import ArgumentError, UnsupportedError
from partsong.samplers.text.rekey import Rekeying, WeightPlace
from partsong.samplers.text.runner import GROUPED

__all__ = ["load_rekeyed", "load_stock", "weight_files"]

#: Most names in a message; the rest are counted.
_LISTED = 6

#: Tensors of checkpoints pre-trained with a second head, which a masked-LM model has no use for.
_SECOND_HEADS = ("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids")


def load_rekeyed(
    folder: Path, rekeying: Rekeying, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> PreTrainedModel:
    """Loads a public checkpoint's weights into a stock module.

    One tensor of the files is in memory at a time besides the module itself.

    Args:
        folder: with ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        rekeying: where each tensor goes.
        dtype: that of the parameters. Default: that of the checkpoint's first tensor.
        device: default: the CPU.

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
    for file in files:
        with safe_open(file, framework="pt", device=str(target)) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                dtype = dtype or tensor.dtype
                for place in rekeying.places[name]:
                    _put(module, place, tensor, dtype, target)
    module.tie_weights()
    # What the module computes by itself, such as rotary frequencies, was made on the CPU.
    nn.Module.to(module, target)
    return _make_runnable(module)


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
    if place.source is not None:
        tensor = tensor[place.source[0] : place.source[1]]
    if name in owner._buffers:
        owner._buffers[name] = tensor.to(device=device, dtype=owner.get_buffer(name).dtype, copy=True)
        return
    if not place.index:
        # A part keeps the whole tensor of the file alive unless it is copied out.
        owner._parameters[name] = nn.Parameter(tensor.to(dtype, copy=place.source is not None), requires_grad=False)
        return
    held = owner.get_parameter(name)
    if held.is_meta:
        held = nn.Parameter(torch.empty(held.shape, dtype=dtype, device=device), requires_grad=False)
        owner._parameters[name] = held
    held.data[place.index] = tensor.to(dtype)


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
    return _make_runnable(module.eval())


def _make_runnable(module: PreTrainedModel) -> PreTrainedModel:
    """Switches experts in float64 away from the grouped product that transformers prefers: it has no float64."""
    if module.dtype is torch.float64 and getattr(module.config, "_experts_implementation", None) == GROUPED:
        module.set_experts_implementation("eager")
    return module
