"""Finds the parts of a language model whose width can be shared out, by the plan that transformers has for its class.

A part begins with layers of which a rank computes some output columns, and ends with one that reads these columns and
whose outputs are added up over ranks. Heads of queries stay with the head of keys that they read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.tensor_parallel.low_rank import readers_of, writers_of
from partsong.parallel.tensor_parallel.quantised_weights import is_linear
from partsong.parallel.text.stacks import stacks_of

__all__ = ["TextPart", "WeightCut", "find_text_parts"]

#: Layers that some plans leave out.
_LEFT_OUT = {
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}
#: What transformers' plans call layers whose outputs are cut, and layers whose inputs are.
_COLUMNS = ("colwise", "colwise_gather_output", "packed_colwise")
_ROWS = ("rowwise", "rowwise_split_input")
#: Layers that compute several pieces one after the other: queries, keys and values, or a gate and what it opens.
_SEVERAL = {"qkv_proj": "qkv", "gate_up_proj": "gu"}
#: Norms over the width of all heads.
_NORMS = {"q_norm": "q", "k_norm": "k"}
#: A head is whole in the layers of this attention: its query, key and value lie side by side.
_HEADS_SIDE_BY_SIDE = ("query_key_value",)


@dataclass(frozen=True, slots=True)
class WeightCut:
    """Describes which part of a weight a rank holds: the same share of the units of each piece.

    Attributes:
        layer: the module that has it.
        name: of the weight in it.
        dim: of the weight that is cut.
        pieces: numbers of units, and of columns in a unit, one piece after the other.
    """

    layer: nn.Module
    name: str
    dim: int
    pieces: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Describes one part.

    Attributes:
        name: where it stands in the model, for messages.
        kind: ``attention``, ``feed-forward`` or ``experts``.
        units: heads of keys, or columns.
        cuts: its weights.
        summed: the module whose output is added up.
        norms: norms over all columns between them, with the columns of a unit.
        heads: the attention and its heads of queries; None in other parts.
    """

    name: str
    kind: str
    units: int
    cuts: tuple[WeightCut, ...]
    summed: nn.Module
    norms: tuple[tuple[nn.Module, int], ...] = ()
    heads: tuple[nn.Module, int] | None = None


def find_text_parts(model: Any) -> Iterator[TextPart]:
    """Yields the parts of a transformers model. What is in no part stays whole on every rank.

    Raises:
        UnsupportedError: transformers has no plan for its class.
    """
    stated: Mapping[str, str] | None = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    plan = {**_LEFT_OUT, **(stated or {})}
    if not stated:
        raise UnsupportedError(
            f"TensorParallel on {type(model).__name__}: transformers has no plan that says how its layers are cut; use "
            "ShardedWeights"
        )
    for stack in stacks_of(model):
        yield from _parts_of(type(model).__name__, stack, plan)


def _parts_of(model: str, stack: nn.Module, plan: Mapping[str, str]) -> Iterator[TextPart]:
    children = defaultdict[str, dict[str, str]](dict)
    for name, _ in (*stack.named_modules(), *stack.named_parameters()):
        style = next((style for key, style in plan.items() if _is_at(name, key)), None)
        if style in (*_COLUMNS, *_ROWS):
            path, _, last = name.rpartition(".")
            children[path][last] = style
    for path, styles in children.items():
        parent = stack.get_submodule(path)
        rows = [name for name, style in styles.items() if style in _ROWS]
        columns = [name for name, style in styles.items() if style in _COLUMNS]
        if len(rows) != 1 or not columns:
            raise UnsupportedError(
                f"TensorParallel on {model}: the plan of transformers for {path} has {len(rows)} layers "
                "whose inputs are cut, and one is known here; use ShardedWeights"
            )
        if not isinstance(getattr(parent, rows[0]), nn.Module):
            yield _experts(path, parent, columns, rows[0])
        elif isinstance(getattr(parent, "head_dim", getattr(parent, "head_size", None)), int):
            yield _attention(path, parent, columns, rows[0])
        else:
            yield _feed_forward(path, parent, columns, rows[0])


def _is_at(name: str, key: str) -> bool:
    """Says whether a module of the base model is one that a plan names.

    >>> _is_at("layers.3.mlp.up_proj", "layers.*.mlp.up_proj"), _is_at("layers.3.mlp", "layers.*.mlp.up_proj")
    (True, False)
    """
    pattern = re.escape(key).replace(r"\*", r"\d+")
    return re.fullmatch(rf"(?:.*\.)?{pattern}", name) is not None


def _attention(name: str, module: Any, columns: list[str], row: str) -> TextPart:
    width: int = getattr(module, "head_dim", None) or module.head_size
    output = getattr(module, row)
    heads = output.in_features // width
    key = getattr(module, "k_proj", None)
    if key is not None:
        keys = key.out_features // width
    elif (fused := getattr(module, "qkv_proj", None)) is not None:
        keys = (fused.out_features // width - heads) // 2
    else:
        keys = heads
    sizes = {"q": (keys, heads // keys * width), "k": (keys, width), "v": (keys, width)}
    cuts = []
    for column in columns:
        layer = getattr(module, column)
        if column in _HEADS_SIDE_BY_SIDE:
            pieces: tuple[tuple[int, int], ...] = ((heads, 3 * width),)
        else:
            pieces = tuple(sizes[letter] for letter in _SEVERAL.get(column, column[0]))
        cuts += _outputs(name, layer, pieces)
    norms = [
        (norm, letter)
        for each, letter in _NORMS.items()
        if (norm := getattr(module, each, None)) is not None and _span(norm) == sizes[letter][0] * sizes[letter][1]
    ]
    norms = [(norm, letter) for norm, letter in norms if _span(norm) != width or heads == 1]
    cuts += [WeightCut(norm, "weight", 0, (sizes[letter],)) for norm, letter in norms]
    cuts += _inputs(name, output, (sizes["q"],))
    spans = tuple((norm, sizes[letter][1]) for norm, letter in norms)
    return TextPart(name, "attention", keys, tuple(cuts), output, spans, (module, heads))


def _feed_forward(name: str, module: nn.Module, columns: list[str], row: str) -> TextPart:
    output: Any = getattr(module, row)
    width = output.in_features
    cuts = [
        cut
        for column in columns
        for cut in _outputs(name, getattr(module, column), ((width, 1),) * len(_SEVERAL.get(column, "u")))
    ]
    return TextPart(name, "feed-forward", width, (*cuts, *_inputs(name, output, ((width, 1),))), output)


def _experts(name: str, module: nn.Module, columns: list[str], row: str) -> TextPart:
    """Cuts every expert's columns: its weights are stacked in one tensor `[experts, outputs, inputs]`."""
    width = getattr(module, row).shape[2]
    cuts = [WeightCut(module, column, 1, ((width, 1),) * len(_SEVERAL.get(column, "u"))) for column in columns]
    return TextPart(name, "experts", width, (*cuts, WeightCut(module, row, 2, ((width, 1),))), module)


def _outputs(name: str, layer: nn.Module, pieces: tuple[tuple[int, int], ...]) -> list[WeightCut]:
    """Cuts the outputs of a layer, and of a LoRA on it."""
    _check(name, layer)
    return [
        WeightCut(writer, each, 0, pieces)
        for writer in writers_of(layer)
        for each, _ in writer.named_parameters(recurse=False)
    ]


def _inputs(name: str, layer: nn.Module, pieces: tuple[tuple[int, int], ...]) -> list[WeightCut]:
    """Cuts the inputs of a layer, and of a LoRA on it."""
    _check(name, layer)
    return [WeightCut(reader, "weight", 1, pieces) for reader in readers_of(layer)]


def _check(name: str, layer: nn.Module) -> None:
    if not is_linear(layer):
        raise UnsupportedError(
            f"TensorParallel: {name} has a {type(layer).__name__} where a linear layer is known; take off what was put "
            "around it, or use ShardedWeights"
        )


def _span(norm: nn.Module) -> int:
    return next(norm.parameters()).numel()
