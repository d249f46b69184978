"""Adds up the memory that the fullest rank of a generation needs."""

from __future__ import annotations

from partsong.planner.hardware import Device
from partsong.planner.part_loops import QueueSteps
from partsong.planner.steps import TracedSteps, Tracer

__all__ = ["RESERVED", "fits", "memory_of"]

#: Rows and columns of the tiles in which an autoencoder decodes what it cannot hold at once.
_TILE = 512
#: Share of a device's memory that its libraries and a fragmented allocator take.
RESERVED = 0.08


def memory_of(
    traced: TracedSteps, tracer: Tracer, device: Device, sharers: int, *, encodes_once: bool
) -> tuple[int, bool]:
    """Returns the bytes that the fullest rank needs, and whether that takes decoding in tiles.

    Args:
        traced: the steps.
        tracer: of the model and the size.
        device: of a rank.
        sharers: ranks that share the decoding.
        encodes_once: whether text encoders make room before the denoiser needs it.
    """
    subject, size, decoder = tracer.subject, tracer.size, tracer.decoding
    encoders = sum(encoder.parameters for encoder in subject.encoders) * subject.dtype.itemsize
    # Encoded once, prompts are known before the denoiser needs its room, and the encoders wait in the host's memory.
    resident = traced.weights + (0 if decoder is None else decoder.weights) + (0.0 if encodes_once else encoders)
    peaks = [resident + traced.working, encoders if encodes_once else 0.0]
    if decoder is None:
        return int(max(peaks)), False
    # A loop that streams decodes block after block, so its memory does not grow with the length.
    pixels = size.height * size.width * traced.frames if isinstance(traced, QueueSteps) else size.pixels
    whole = resident + decoder.memory(-(-pixels // sharers))
    if whole <= device.memory * (1 - RESERVED) or whole <= max(peaks):
        return int(max(*peaks, whole)), False
    tile = resident + decoder.memory(min(pixels, _TILE * _TILE * subject.frames)) + 3 * 2 * pixels
    return int(max(*peaks, min(tile, whole))), tile < whole


def fits(memory: int, device: Device) -> bool:
    """Says whether a device can hold a number of bytes beside what its libraries take."""
    return memory <= device.memory * (1 - RESERVED)
