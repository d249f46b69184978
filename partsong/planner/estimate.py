"""Predicts a whole generation under a mix of strategies: seconds with an interval, bytes, memory and drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partsong.knobs import format_knobs
from partsong.parallel.strategy import Kind, Strategy, combined_kind
from partsong.planner.clock import StepsTime, clock_steps, decoding_seconds, encoding_seconds
from partsong.planner.hardware import Device, Machine
from partsong.planner.measured import drift_of
from partsong.planner.steps import TracedSteps, Tracer
from partsong.samplers.registry import EncodeOnce, ParallelVae, strategies

__all__ = ["RESERVED", "Estimate", "estimate", "fits", "flags"]

#: Four latencies in five lie within these factors of their prediction: on machines that were measured (68 rows of
#: benchmarks/results/planner/2026-11-25 and -small), and on those of data sheets (79 rows of 2026-11-25-published).
_MEASURED, _PUBLIC = (0.8, 1.45), (0.65, 1.6)
#: Rows and columns of the tiles in which an autoencoder decodes what it cannot hold at once.
_TILE = 512
#: Share of a device's memory that its libraries and a fragmented allocator take.
RESERVED = 0.08


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Says what a generation takes under a mix of strategies.

    Attributes:
        strategies: the mix.
        seconds: of the whole generation.
        seconds_low: four in five lie between this
        seconds_high: and this.
        denoising: seconds of the steps.
        encoding: seconds of the text encoders.
        decoding: seconds of the autoencoder.
        waiting: seconds of the steps in which a device waits for messages.
        bytes_sent: by the first rank, in all steps.
        memory: bytes that the fullest rank needs.
        tiled: whether the autoencoder has to decode in tiles to fit.
        kind: ``exact``, ``bounded`` or ``approximate``.
        drift: root mean square difference of pixels in [0, 1] to expect; 0 where it is exact.
        drift_file: what measured it; None where it is exact.
        reason: one sentence that says where the time goes.
    """

    strategies: tuple[Strategy, ...]
    seconds: float
    seconds_low: float
    seconds_high: float
    denoising: float
    encoding: float
    decoding: float
    waiting: float
    bytes_sent: int
    memory: int
    tiled: bool
    kind: Kind
    drift: float
    drift_file: str | None
    reason: str

    @property
    def strategy(self) -> str:
        """Returns the mix as the command line writes it; ``serial`` where there is none."""
        return flags(self.strategies)


def flags(mix: Sequence[Strategy]) -> str:
    """Writes a mix as the command line reads it, one strategy after the other; ``serial`` where there is none."""
    return " ".join(format_knobs(strategy, strategies()) for strategy in mix) or "serial"


def estimate(tracer: Tracer, mix: Sequence[Strategy], machine: Machine, steps: int) -> Estimate:
    """Predicts a generation.

    Args:
        tracer: of the model and the size.
        mix: the strategies.
        machine: what the ranks run on.
        steps: of the generation.

    Raises:
        PartsongError: the mix has no correct form on this model, or on so many ranks.
    """
    traced = tracer.trace([strategy for strategy in mix if strategy.denoises], machine.ranks, steps)
    steps_take = clock_steps(traced, machine)
    subject, size, decoder = tracer.subject, tracer.size, tracer.decoding
    sharers = machine.ranks if any(isinstance(strategy, ParallelVae) for strategy in mix) else 1
    encoding, decoding = encoding_seconds(subject, machine.device, size.batch), 0.0
    if decoder is not None:
        decoding = decoding_seconds(decoder, machine.device, -(-size.pixels // sharers)) * size.batch
    encodes_once = any(isinstance(strategy, EncodeOnce) for strategy in mix) and machine.ranks > 1
    memory, tiled = _memory(traced, tracer, sharers, encodes_once, machine.device)
    total = encoding + steps_take.seconds + decoding
    low, high = _MEASURED if machine.device.measured and machine.link.measured else _PUBLIC
    drift, file = drift_of(mix, machine.ranks)
    return Estimate(
        strategies=tuple(mix),
        seconds=total,
        seconds_low=total * low,
        seconds_high=total * high,
        denoising=steps_take.seconds,
        encoding=encoding,
        decoding=decoding,
        waiting=steps_take.waiting,
        bytes_sent=traced.bytes_sent,
        memory=memory,
        tiled=tiled,
        kind=combined_kind(mix),
        drift=drift,
        drift_file=file,
        reason=_reason(steps_take, encoding, decoding),
    )


def _memory(traced: TracedSteps, tracer: Tracer, sharers: int, encodes_once: bool, device: Device) -> tuple[int, bool]:
    """Returns the bytes that the fullest rank needs, and whether that takes decoding in tiles."""
    subject, size, decoder = tracer.subject, tracer.size, tracer.decoding
    encoders = sum(encoder.parameters for encoder in subject.encoders) * subject.dtype.itemsize
    # Encoded once, prompts are known before the denoiser needs its room, and the encoders wait in the host's memory.
    resident = traced.weights + (0 if decoder is None else decoder.weights) + (0.0 if encodes_once else encoders)
    peaks = [resident + traced.working, encoders if encodes_once else 0.0]
    if decoder is None:
        return int(max(peaks)), False
    whole = resident + decoder.memory(-(-size.pixels // sharers))
    if whole <= device.memory * (1 - RESERVED) or whole <= max(peaks):
        return int(max(*peaks, whole)), False
    tile = resident + decoder.memory(min(size.pixels, _TILE * _TILE * subject.frames)) + 3 * 2 * size.pixels
    return int(max(*peaks, min(tile, whole))), tile < whole


def _reason(steps: StepsTime, encoding: float, decoding: float) -> str:
    total = max(steps.seconds + encoding + decoding, 1e-9)
    waits = 100 * steps.waiting / total
    parts = [f"{100 * (steps.seconds - steps.waiting) / total:.0f} % computing steps"]
    parts += [f"{waits:.0f} % waiting for messages"] if waits >= 1 else []
    parts += [f"{100 * decoding / total:.0f} % decoding"] if decoding / total >= 0.01 else []
    parts += [f"{100 * encoding / total:.0f} % reading the prompt"] if encoding / total >= 0.01 else []
    return ", ".join(parts)


def fits(memory: int, device: Device) -> bool:
    """Says whether a device can hold so many bytes beside what its libraries take."""
    return memory <= device.memory * (1 - RESERVED)
