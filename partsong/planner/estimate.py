"""Predicts a whole generation under a mix of strategies: seconds with an interval, bytes, memory and drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partsong.knobs import format_knobs
from partsong.parallel.strategy import Kind, Strategy, combined_kind
from partsong.planner.clock import clock_generation
from partsong.planner.hardware import Machine
from partsong.planner.measured import drift_of
from partsong.planner.memory import memory_of
from partsong.planner.steps import Tracer
from partsong.samplers.registry import EncodeOnce, ParallelVae, strategies

__all__ = ["Estimate", "estimate", "flags"]

#: Four latencies in five lie within these factors of their prediction: on machines that were measured (68 rows of
#: benchmarks/results/planner/2026-11-25 and -small), and on those of data sheets (79 rows of 2026-11-25-published).
_MEASURED, _PUBLIC = (0.8, 1.45), (0.65, 1.6)


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
        PartsongError: the mix has no correct form on this model, or on this number of ranks.
    """
    sharers = machine.ranks if any(isinstance(strategy, ParallelVae) for strategy in mix) else 1
    encodes_once = any(isinstance(strategy, EncodeOnce) for strategy in mix) and machine.ranks > 1
    traced = tracer.trace([strategy for strategy in mix if strategy.denoises], machine.ranks, steps)
    time = clock_generation(traced, tracer, machine, steps, sharers)
    memory, tiled = memory_of(traced, tracer, machine.device, sharers, encodes_once=encodes_once)
    low, high = _MEASURED if machine.device.measured and machine.link.measured else _PUBLIC
    drift, file = drift_of(mix, machine.ranks)
    reason = time.reason
    if any(strategy.offloads for strategy in mix):
        away = sum(weight.nbytes for weight in tracer.subject.denoiser.parameters()) - traced.weights
        waits = replace(time, waits_for="messages and weights" if machine.ranks > 1 else "weights").reason
        reason = f"{waits}; {machine.per_node * away / 1e9:.0f} GB of weights are in the host's memory"
    return Estimate(
        strategies=tuple(mix),
        seconds=time.seconds,
        seconds_low=time.seconds * low,
        seconds_high=time.seconds * high,
        denoising=time.steps.seconds + time.repeated,
        encoding=time.encoding,
        decoding=time.decoding,
        waiting=time.steps.waiting,
        bytes_sent=traced.bytes_sent,
        memory=memory,
        tiled=tiled,
        kind=combined_kind(mix),
        drift=drift,
        drift_file=file,
        reason=reason,
    )
