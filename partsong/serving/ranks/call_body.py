"""Reads the arguments of a denoiser's call from a safetensors file, and writes its prediction as one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from partsong.errors import ArgumentError

__all__ = ["CallBody", "on_device", "read_call", "write_prediction"]


@dataclass(frozen=True, slots=True)
class CallBody:
    """Holds what a client sent for one call.

    Attributes:
        named: arguments by name; tensors named ``a.b`` are entry ``b`` of the mapping ``a``.
        unchanged: names of arguments that are those of the session's last call.
    """

    named: dict[str, Any]
    unchanged: tuple[str, ...] = ()


def read_call(body: bytes) -> CallBody:
    """Reads a client's arguments.

    Tensors are arguments of their names. Two entries of the file's metadata hold JSON: ``arguments``, an object with
    those that are no tensors, and ``unchanged``, a list of names.

    Raises:
        ArgumentError: it is no such file.
    """
    try:
        tensors = safetensors.torch.load(body)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise ArgumentError(f"the body is no safetensors file: {error}") from None
    facts = header.get("__metadata__", {})
    named = _read_json(facts, "arguments", dict, "an object")
    unchanged = _read_json(facts, "unchanged", list, "a list")
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        place = named
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ArgumentError(f"the tensor {name!r} is part of {part!r}, which is given as something else")
        place[last] = tensor
    return CallBody(named, tuple(map(str, unchanged)))


def write_prediction(sample: Tensor) -> bytes:
    """Returns a prediction as a safetensors file with one tensor, ``sample``."""
    return safetensors.torch.save({"sample": sample.detach().to("cpu", copy=True).contiguous()})


def _read_json(facts: dict[str, str], name: str, kind: type, wanted: str) -> Any:
    try:
        value = json.loads(facts.get(name) or json.dumps(kind()))
    except ValueError as error:
        raise ArgumentError(f"the metadata's {name!r} is no JSON: {error}") from None
    if not isinstance(value, kind):
        raise ArgumentError(f"the metadata's {name!r} should hold {wanted} as JSON")
    return value


def on_device(value: Any, device: torch.device, given: torch.dtype | None, dtype: torch.dtype) -> Any:
    """Moves the tensors of an argument to a device; those of type `given` get another type."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.dtype == given else None)
    if isinstance(value, dict):
        return {name: on_device(part, device, given, dtype) for name, part in value.items()}
    return value
