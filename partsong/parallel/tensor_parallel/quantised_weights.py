"""Cuts weights into columns, also those that a quantiser holds as whole numbers with scales.

A cut keeps a quantised weight's numbers and scales as they are, so a rank's columns have, to the last bit, the same
values as in the whole weight. Where that is impossible, the cut is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.tensor_parallel.low_rank import base_of, variant_of

__all__ = ["check_layers", "cut_weight", "is_linear"]

#: Linear layers of quantisers that hold their weight as `nn.Linear` does, or row by row in blocks.
_LINEAR = ("GGUFLinear",)
#: Layers that hold it in one flat run of packed numbers, which cannot be cut -> the package.
_PACKED = {"Linear4bit": "bitsandbytes", "Linear8bitLt": "bitsandbytes", "SVDQLinear": "nunchaku"}

#: Attributes of torchao's tensors that say how inputs are quantised; None where they are not.
_OF_INPUTS = ("act_quant_kwargs", "activation_quantization")

_ADVICE = "use another strategy, such as Ulysses or CfgParallel, whose ranks have whole weights"

#: Start and length of each run of columns.
Runs = Sequence[tuple[int, int]]


def is_linear(layer: Any) -> bool:
    """Says whether a layer is a linear one, quantised or not and with a LoRA or without, whose weight can be cut."""
    base = base_of(layer)
    return type(base) is nn.Linear or type(base).__name__ in _LINEAR


def check_layers(model: nn.Module) -> None:
    """Refuses a model with layers whose weights have no columns to cut.

    Raises:
        UnsupportedError: names the layer, and the quantiser or what was put on it.
    """
    for name, module in model.named_modules():
        variant = variant_of(module)
        if variant is not None and base_of(module) is module and isinstance(module.base_layer, nn.Linear):
            raise UnsupportedError(
                f"TensorParallel: {name} has a {variant}, which looks across all columns of a weight, and a rank has "
                f"only some; call fuse_lora() first, or {_ADVICE}"
            )
        package = _PACKED.get(type(module).__name__)
        if package is not None:
            raise UnsupportedError(
                f"TensorParallel: {name} is a {type(module).__name__} of {package}, which packs its weight so that it "
                f"has no columns to cut; quantise with torchao or GGUF, or {_ADVICE}"
            )


def cut_weight(weight: Tensor, runs: Runs, dim: int, name: str) -> nn.Parameter:
    """Returns some columns of a weight, as a view if they are one run.

    Args:
        weight: `[outputs, inputs]`, or another tensor with the columns in its first dimension.
        runs: start and length of each run.
        dim: 0 cuts outputs, 1 inputs.
        name: of the part it belongs to, for messages.

    Raises:
        UnsupportedError: a run ends within a group of numbers that share a scale, or the quantiser computes with scales
            over all inputs.
    """
    weight = weight.detach()
    if hasattr(weight, "quant_type"):
        return _cut_blocks(weight, runs, dim, name)
    if type(weight) is Tensor:
        pieces = [weight.narrow(dim, *run) for run in runs]
        return nn.Parameter(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim), requires_grad=False)
    if dim == 1 and any(getattr(weight, name, None) is not None for name in _OF_INPUTS):
        raise UnsupportedError(
            f"TensorParallel: {name} quantises its inputs while it runs, with a scale over all of them, and a rank has "
            f"only some; quantise the weights only, or {_ADVICE}"
        )
    try:  # torchao's classes have no common error for cuts that are impossible
        cut = _joined(weight, [weight.narrow(dim, *run) for run in runs], dim)
        is_right = weight.is_meta or _is_worth(cut, weight, runs, dim)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as problem:
        raise _group_error(weight, runs, dim, name) from problem
    if not is_right:
        raise _group_error(weight, runs, dim, name)
    return nn.Parameter(cut, requires_grad=False)


def _cut_blocks(weight: Any, runs: Runs, dim: int, name: str) -> nn.Parameter:
    """Cuts a weight of GGUF, whose rows are blocks of bytes."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[weight.quant_type]
    if dim == 1:
        if any(start % numbers or count % numbers for start, count in runs):
            raise _group_error(weight, runs, dim, name)
        runs = [(start // numbers * size, count // numbers * size) for start, count in runs]
    pieces = [weight.as_tensor().narrow(dim, *run) for run in runs]
    # Its dequantisation assumes that the bytes are stored row after row.
    return type(weight)(torch.cat(pieces, dim).contiguous(), quant_type=weight.quant_type)


def _group_error(weight: Any, runs: Runs, dim: int, name: str) -> UnsupportedError:
    ends = ", ".join(f"{start} to {start + count}" for start, count in runs)
    return UnsupportedError(
        f"TensorParallel: {name} has a {type(weight).__name__} whose groups of numbers with one scale cannot be cut at "
        f"{'inputs' if dim else 'outputs'} {ends}; take smaller groups or a degree whose shares are whole groups, or "
        f"{_ADVICE}"
    )


def _joined(weight: Any, pieces: list[Any], dim: int) -> Tensor:
    """Puts parts of a quantised weight together; most of torchao's classes know no concatenation."""
    if len(pieces) == 1:
        return pieces[0]
    size = list(pieces[0].shape)
    size[dim] = sum(piece.shape[dim] for piece in pieces)
    names, attributes = pieces[0].__tensor_flatten__()
    block = list(attributes["block_size"])
    # Scales of a whole row are the same in each part, and those of groups are concatenated.
    is_for_all = weight.block_size[dim] == weight.shape[dim] > 1
    if is_for_all:
        block[dim] = size[dim]
    inner = {name: [getattr(piece, name) for piece in pieces] for name in names}
    whole = {
        name: parts[0] if is_for_all and parts[0].shape[dim] == 1 else torch.cat(parts, dim)
        for name, parts in inner.items()
    }
    attributes = {**attributes, "block_size": type(weight.block_size)(block)}
    return type(weight).__tensor_unflatten__(whole, attributes, torch.Size(size), None)


def _is_worth(cut: Any, weight: Any, runs: Runs, dim: int) -> bool:
    """Says whether columns have the same values as in the whole weight."""
    whole = weight.dequantize()
    return torch.equal(cut.dequantize(), torch.cat([whole.narrow(dim, *run) for run in runs], dim))
