"""Keeps what a model computes from the text alone, such as the keys of cross-attention, from step to step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from partsong.accelerator import is_on_host
from partsong.errors import UnsupportedError
from partsong.knobs import Count
from partsong.parallel.adapters import Adapter
from partsong.parallel.hooks.known_values import place_for_memory
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, InputHook, signature_of
from partsong.parallel.strategy import Site, Strategy

__all__ = ["CrossAttentionCache"]

#: Arguments of denoisers that hold a text, or an image in place of one.
_TEXTS = "encoder_hidden_states"
#: Layers of attention that turn a text into keys and values.
_KEYS = (
    "to_k",
    "to_v",
    "to_kv",
    "to_key",
    "to_value",
    "add_k_proj",
    "add_v_proj",
    "norm_k",
    "norm_added_k",
    "norm_key",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossAttentionCache(Strategy):
    """Keeps what a model computes from the text alone, such as the keys and values of cross-attention. Exact.

    These are the same numbers in every step of a generation, so they are computed in the first step only, and outputs
    are equal to the last bit. They are dropped when the generation ends, and computed anew where the text or a weight
    has been written to since. Nothing is kept while gradients are on, by a model in training mode, or, on a GPU, of a
    text made in ``torch.inference_mode``, which does not record writes. It has no ranks of its own: combine it with the
    strategies that split, or use it on one rank.

    It takes memory: two numbers per position of the text, channel and block, for each text.

    Use it when the model reads the text by cross-attention and a step takes little time, as on CPUs or over many ranks.

    Args:
        texts: texts that are kept at once, such as those of the branches of guidance that are called one by one.

    Example:
        >>> CrossAttentionCache().kind
        'exact'
    """

    keeps_layers: ClassVar[bool] = True
    passes_gradients: ClassVar[bool] = True

    texts: Count = 4

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models without a text."""
        if any(name.startswith(_TEXTS) for name in adapter.batched):
            return None
        return "it reads no text, so there is nothing to keep; leave it out"

    def attach(self, denoiser: Site, hooks: HookSet) -> KeptTexts:
        """Puts hooks on the layers that may read the text alone.

        Raises:
            UnsupportedError: the model reads no text.
        """
        if (reason := self.refuses(denoiser.adapter)) is not None:
            raise UnsupportedError(f"CrossAttentionCache on {denoiser.adapter.model}: {reason}")
        kept = KeptTexts(self.texts)
        for layer in _layers(denoiser.module, denoiser.adapter):
            hooks.add(layer, AroundHook(kept.around(layer), signature_of(layer)), "text")
        hooks.add(denoiser.module, InputHook(kept.note, signature_of(denoiser.module)), "texts")
        denoiser.clock.on_begin(kept.clear)
        denoiser.clock.on_end(kept.clear)
        return kept


def _layers(module: nn.Module, adapter: Adapter) -> Iterator[nn.Module]:
    """Yields the layers that take one tensor, which may be the text: projections before the blocks, and of keys."""
    lists = tuple(f"{name}." for name, child in module.named_modules() if isinstance(child, nn.ModuleList))
    for name, child in module.named_modules():
        attention, _, last = name.removesuffix(".base_layer").rpartition(".")
        if not name or type(child).__module__.startswith("peft.") or not _takes_one_tensor(child):
            continue
        in_blocks = name.startswith(lists)
        projects = (
            not in_blocks and name.count(".") < 2 and any(isinstance(each, nn.Linear) for each in child.modules())
        )
        if projects or (last in _KEYS and adapter.streams_of(attention) is None):
            yield child


def _takes_one_tensor(module: nn.Module) -> bool:
    given = [each for each in signature_of(module).parameters.values() if each.default is inspect.Parameter.empty]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(given) == 1 and given[0].kind in plain and not isinstance(module, nn.ModuleList)


@dataclass(slots=True)
class _Kept:
    """Holds what a layer has returned for a text.

    Attributes:
        text: the text, which stays alive so that its memory is not used for another.
        output: what the layer returned.
        place: the memory and version of the output.
        stamp: the memory and versions of the layer's weights at that time.
        weights: that memory, which stays alive for the same reason.
    """

    text: Tensor
    output: Tensor
    place: Hashable
    stamp: tuple[Hashable, ...]
    weights: tuple[Tensor, ...]


class KeptTexts:
    """Returns what layers have returned for the same text before.

    On a CPU a text is the same if its numbers are; reading them takes no time there. On a GPU the host would wait for
    them, so a text is the same if it is the same memory and was not written to.

    Args:
        texts: texts that the model and each of its layers remember.
    """

    postponed, skips_blocks = (), False

    def __init__(self, texts: int) -> None:
        self.texts = texts
        self._own: list[Tensor] = []
        self._known: set[Hashable] = set()
        self._kept: dict[nn.Module, OrderedDict[Hashable, _Kept]] = {}

    def note(self, named: dict[str, Any]) -> None:
        """Notes the texts of a call of the model, and puts its own copies of texts on a CPU in their place."""
        self._known.clear()
        if not torch.is_grad_enabled():
            named |= {name: self._noted(value) for name, value in named.items() if name.startswith(_TEXTS)}

    def _noted(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._noted, value))
        if not isinstance(value, Tensor):
            return value
        text = self._copy_of(value) if is_on_host(value.device) and not value.is_meta else value
        self._known.add(place_for_memory(text))
        return text

    def _copy_of(self, text: Tensor) -> Tensor:
        """Returns this cache's own copy of a text, which nobody else writes to."""
        place = next((place for place, own in enumerate(self._own) if _are_equal(own, text)), None)
        with torch.inference_mode(False), torch.no_grad():
            own = text.clone() if place is None else self._own.pop(place)
        self._own = [*self._own, own][-self.texts :]
        return own

    def clear(self) -> None:
        """Forgets what was kept in a generation."""
        self._own.clear()
        self._known.clear()
        self._kept.clear()

    def around(self, layer: nn.Module) -> Callable[..., Any]:
        """Returns what is called in place of a layer."""

        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            text = next(iter(named.values()))
            place = place_for_memory(text) if isinstance(text, Tensor) else None
            if place is None or place not in self._known or len(named) != 1 or layer.training:
                return forward(**named)
            cast = not text.is_meta and torch.is_autocast_enabled(text.device.type)
            return self._of(layer, text, (place, cast), lambda: forward(**named))

        return run

    def _of(self, layer: nn.Module, text: Tensor, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Returns the output of a layer for a text, computed where it is not known."""
        mine, stamp = self._kept.setdefault(layer, OrderedDict()), _stamp(layer)
        kept = mine.get(key)
        if kept is None or kept.stamp != stamp or kept.place != place_for_memory(kept.output):
            with torch.inference_mode(False), torch.no_grad():  # tensors of inference mode do not record writes
                output = compute()
                own = output.clone() if isinstance(output, Tensor) else None  # a captured graph writes to its own again
            if own is None or None in stamp or (place := place_for_memory(own)) is None:
                return output
            kept = mine[key] = _Kept(text, own, place, stamp, tuple(each.detach() for each in layer.parameters()))
        mine.move_to_end(key)
        if len(mine) > self.texts:
            mine.popitem(last=False)
        self._known.add(kept.place)
        return kept.output

    def predict(self, step: int, batch: int, index: int) -> int:
        """Returns the bytes that a rank sends for it: none."""
        return 0


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _stamp(layer: nn.Module) -> tuple[Hashable, ...]:
    """Returns what changes when a layer's weights are exchanged or written to; with None where that is not seen."""
    return tuple(map(_place, layer.parameters()))


def _place(weight: Tensor) -> Hashable:
    if type(weight.data) is Tensor:
        return place_for_memory(weight)
    # Quantised weights have no memory of their own.
    return None if weight.is_inference() else (id(weight), weight._version)
