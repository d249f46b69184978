"""Refuses calls of a hooked model that cannot be right: on another device, with other layers or other arguments."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partsong.errors import UnsupportedError
from partsong.parallel.ranks.health import operation
from partsong.parallel.ranks.mesh import Axis, Mesh

__all__ = ["KnownLayers", "check_device", "check_given", "check_same"]


class KnownLayers:
    """Remembers the layers of a model that has been hooked.

    Args:
        module: the model, with its hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self._layers = module, [*module.modules()]

    def check(self) -> None:
        """Compares them with the model's present layers.

        Raises:
            UnsupportedError: a layer was added or removed.
        """
        if self._layers == [*self.module.modules()]:
            return
        known = set(self._layers)
        fresh = next((name for name, child in self.module.named_modules() if child not in known), None)
        changed = f"{fresh} is new" if fresh else "some are gone"
        raise UnsupportedError(
            f"the layers of {type(self.module).__name__} have changed since parallelize(): {changed}; load adapters "
            "such as LoRA first, or call undo() and parallelize() again"
        )


def check_device(model: str, latents: Any, mesh: Mesh) -> None:
    """Refuses a model that was moved to a device on which its ranks are not connected.

    Args:
        model: its name.
        latents: a tensor, or lists of tensors for samples with several pictures.
        mesh: the ranks.
    """
    tensor = next((part for part in tree_leaves(latents) if isinstance(part, Tensor)), None)
    device, ours = mesh.device if tensor is None else tensor.device, mesh.device
    if device.type != ours.type:
        raise UnsupportedError(
            f"the latents of {model} are on {device}, and the ranks of this plan exchange on {ours}; "
            f"move the pipeline there, or make a mesh on {device}"
        )


def check_given(model: str, refused: Mapping[str, str], named: Mapping[str, Any]) -> None:
    """Refuses a call with an argument that no parallel form here handles."""
    for name, reason in refused.items():
        if named.get(name) is not None:
            raise UnsupportedError(f"{model}: {name} was given; {reason}")


def check_same(everyone: Axis, models: Sequence[nn.Module], parts: Sequence[nn.Module]) -> None:
    """Refuses programs and models that differ between ranks, whose messages would not fit; raises on all ranks alike.

    Args:
        everyone: all ranks.
        models: the models, whole, whose adapters, such as LoRAs, are compared too.
        parts: what else computes, such as text encoders; a rank may lack some.

    Raises:
        UnsupportedError: names the rank, what differs and how.
    """
    if everyone.dry or everyone.size == 1:
        return
    facts: dict[str, list[Any]] = defaultdict(list)
    for name in ("partsong", "torch", "diffusers"):
        facts[f"version of {name}"] = [import_module(name).__version__]
    for model in models:
        facts[f"adapters on its {type(model).__name__}"].append(_adapter_digest(model))
    for model in dict.fromkeys((*models, *parts)):
        weights, name = [*model.parameters()], type(model).__name__
        facts[f"types in its {name}"] += sorted({str(weight.dtype) for weight in weights})
        # Weights that are read later have no device yet.
        facts[f"devices of its {name}"] += sorted({weight.device.type for weight in weights} - {"meta"})
    # Not one of the exchanges that the ledger counts: plans are often made before there is one.
    table: list[Any] = [None] * everyone.size
    with operation("comparison of what ranks run", everyone.ranks):
        dist.all_gather_object(table, facts, group=everyone.group)
    for rank, row in zip(everyone.ranks, table, strict=True):
        for name, first in table[0].items():
            if (own := row.get(name)) and first and own != first:
                values = "" if isinstance(first[0], int) else f": {', '.join(own)} and {', '.join(first)}"
                raise UnsupportedError(
                    f"rank {rank} has other {name} than rank {everyone.ranks[0]}{values}; load the same, with the same "
                    "weights, on every rank"
                )


def _adapter_digest(model: nn.Module) -> int:
    """Returns a number for the adapters on a model: their names, their weights in use, and some of their values."""
    digest = 0
    for name, layer in model.named_modules():
        if hasattr(layer, "base_layer") and hasattr(layer, "active_adapters"):
            adapters: Any = layer
            facts = (name, tuple(adapters.active_adapters), sorted(getattr(layer, "scaling", {}).items()))
            own = (weight for key, weight in nn.Module.named_parameters(layer) if not key.startswith("base_layer"))
            values = [weight.flatten()[:: max(1, weight.numel() // 4)].tolist() for weight in own if not weight.is_meta]
            digest = zlib.crc32(repr((facts, values)).encode(), digest)
    return digest
