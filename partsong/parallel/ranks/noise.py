"""Gives all ranks the noise of rank 0 where a call has no generator, so every rank would draw its own."""

from __future__ import annotations

import torch
from torch import Tensor

from partsong.accelerator import random_state, set_random_state
from partsong.errors import ArgumentError
from partsong.parallel.ranks.agreement import DTYPES
from partsong.parallel.ranks.collectives import agree, broadcast
from partsong.parallel.ranks.mesh import Axis

__all__ = ["SHAPE_NUMBERS", "share_latents", "share_random_state"]

#: Numbers with which the ranks compare the shape of the first latents.
SHAPE_NUMBERS = 8


def share_latents(everyone: Axis, latents: Tensor) -> Tensor:
    """Returns the first rank's latents on every rank.

    Args:
        everyone: all ranks.
        latents: of any shape, the same on all ranks; they are not changed.

    Raises:
        ArgumentError: the ranks make latents of different shapes. All of them refuse, since a message longer than its
            buffer would end the process.
    """
    padded = [*latents.shape, *[0] * (SHAPE_NUMBERS - 1 - latents.ndim), DTYPES.index(latents.dtype)]
    table = agree(everyone, padded, name="comparison of the ranks' latents")
    for rank, row in zip(everyone.ranks, table, strict=True):
        if row != table[0]:
            pairs = [([int(size) for size in sizes if size], DTYPES[int(type_)]) for *sizes, type_ in (row, table[0])]
            shapes = [f"{shape} of {dtype}" for shape, dtype in pairs]
            raise ArgumentError(
                f"rank {rank} makes latents of shape {shapes[0]}, rank {everyone.ranks[0]} of {shapes[1]}; make the "
                "same call on every rank, with the same height, width, type and number of pictures"
            )
    return broadcast(everyone, latents.clone(), name="sharing of the first latents")


def share_random_state(everyone: Axis, device: torch.device) -> int:
    """Sets the default generators to their state on the first rank, so that all ranks draw the same numbers.

    Samplers that add noise in every step draw it from there when they are given no generator. The first rank
    draws the same numbers as on its own.

    Args:
        everyone: all ranks.
        device: where the model is; its generator is set as well as the CPU's.

    Returns:
        The bytes of the state, which each of the other ranks has received.
    """
    state = torch.get_rng_state()
    torch.set_rng_state(_from_first(everyone, state, device))
    if (on_device := random_state(device)) is None:
        return state.numel()
    set_random_state(_from_first(everyone, on_device, device), device)
    return state.numel() + on_device.numel()


def _from_first(everyone: Axis, state: Tensor, device: torch.device) -> Tensor:
    return broadcast(everyone, state.to(device), name="sharing of the random state").cpu()
