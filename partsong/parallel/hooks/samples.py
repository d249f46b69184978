"""Finds and replaces the samples in what a model of diffusers returned: a tensor, a tuple, or an output object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["map_sample", "map_samples", "sample_of", "samples_of", "with_samples"]


def map_sample(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replaces the sample in what a diffusers model returned: a tensor, a tuple, or an output object."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, list):
        return list(change(sample_of(output)).unbind(0))
    if isinstance(output, tuple):
        return (map_sample(output[0], change), *output[1:])
    return type(output)(**{**output, "sample": map_sample(output["sample"], change)})


def samples_of(output: Any) -> list[Tensor]:
    """Lists all tensors `[B, ...]` that a diffusers model returned, such as those of a video and of its sound."""
    if isinstance(output, (Tensor, list)):
        return [sample_of(output)]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ()
    return [tensor for part in parts if not _is_kept(part) for tensor in samples_of(part)]


def map_samples(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Replaces every tensor `[B, ...]` that a diffusers model returned, in the order of `samples_of`."""
    if isinstance(output, (Tensor, list)):
        return map_sample(output, change)
    if isinstance(output, Mapping):
        parts = {name: part if _is_kept(part) else map_samples(part, change) for name, part in output.items()}
        return type(output)(**parts)
    if isinstance(output, tuple):
        return tuple(part if _is_kept(part) else map_samples(part, change) for part in output)
    return output


def with_samples(output: Any, part: Any, rows: Sequence[int]) -> Any:
    """Replaces some samples of a diffusers model's output by the output of a separate call for them."""
    parts = iter(samples_of(part))
    return map_samples(output, lambda x: x.index_copy(0, torch.tensor(rows, device=x.device), next(parts)))


def _is_kept(part: Any) -> bool:
    """Says whether a part of an output is a plain dictionary, such as a pipeline's cache, and not a sample."""
    return type(part) is dict


def sample_of(output: Any) -> Tensor:
    """Returns the sample `[B, ...]` of what a diffusers model returned; stacks a list with a tensor per picture."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, list):
        return torch.stack(output)
    return sample_of(output[0])
