"""Predicts how long a language model takes for a prompt and for each token after it, and what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from partsong.errors import PartsongError
from partsong.knobs import format_knobs
from partsong.parallel.plan.live_bytes import LiveBytes
from partsong.parallel.plan.predict_text import TextRun
from partsong.parallel.strategy import Strategy
from partsong.parallel.text.cache_names import cache_name, returned_cache
from partsong.planner.choice import CLEAR, Refusal
from partsong.planner.clock import replay
from partsong.planner.hardware import Machine
from partsong.planner.memory import fits
from partsong.planner.trace import CallTrace, Recorder
from partsong.samplers.registry import (
    ContextParallel,
    LayerPipeline,
    ShardedWeights,
    TensorParallel,
    TokenExperts,
    strategies,
)

__all__ = ["TextAdvice", "TextEstimate", "plan_texts"]

#: What the ranks of a language model may share.
_SHARING: tuple[Strategy, ...] = (
    *(TensorParallel(), LayerPipeline(), TokenExperts(), ShardedWeights()),
    ContextParallel(),
)


@dataclass(frozen=True, slots=True)
class TextEstimate:
    """Predicts texts under a strategy.

    Attributes:
        strategy: as the command line writes it; ``serial`` for one device.
        ranks: how many share the model.
        prompt_seconds: until the prompts are read.
        seconds: of a token in every row.
        rows: texts at once.
        bytes_sent: by the rank that sends most, for a token in every row.
        weights: bytes on the rank that holds most.
        keys: bytes of keys and values there, after the prompts.
        memory: bytes at the peak there.
    """

    strategy: str
    ranks: int
    prompt_seconds: float
    seconds: float
    rows: int
    bytes_sent: int
    weights: int
    keys: int
    memory: int

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens of all rows in a second."""
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class TextAdvice:
    """Holds the outcome of planning for a language model on a machine.

    Attributes:
        rows: estimates of what fits, the shortest time of a token first.
        refused: what does not run, or does not fit.
        serial: the estimate of one device, whether it fits or not.
        fits_serial: whether one device holds the model.
    """

    rows: tuple[TextEstimate, ...]
    refused: tuple[Refusal, ...]
    serial: TextEstimate
    fits_serial: bool

    @property
    def choice(self) -> TextEstimate | None:
        """Returns the best, or one device where several bring little; None where nothing fits."""
        if self.fits_serial and (not self.rows or self.rows[0].seconds > self.serial.seconds / CLEAR):
            return self.serial
        return self.rows[0] if self.rows else None

    @property
    def sentence(self) -> str:
        """Says in a sentence what to use."""
        best, serial = self.choice, self.serial
        if best is None:
            return (
                f"Nothing fits: one device would need {serial.memory / 1e9:.1f} GB. Take more devices, or fewer rows."
            )
        if best is serial:
            return f"One device: {best.seconds * 1e3:.3g} ms a token; several are not clearly faster."
        alone = f"{serial.seconds / best.seconds:.2g} times as fast as one device"
        alone = alone if self.fits_serial else f"one device would need {serial.memory / 1e9:.1f} GB"
        return f"{best.strategy} on {best.ranks}: {best.seconds * 1e3:.3g} ms a token, {alone}."


def plan_texts(model: Any, machine: Machine, *, prompt: int, rows: int = 1) -> TextAdvice:
    """Predicts every way to share a language model out over the ranks of a machine.

    Args:
        model: of transformers, on the ``meta`` device in the type it runs in.
        machine: what it runs on.
        prompt: tokens of each prompt.
        rows: texts at once.
    """
    alone = replace(machine, ranks=1, per_node=1, across=None)
    serial, fitting, refused = _estimate(model, None, alone, prompt, rows), list[TextEstimate](), list[Refusal]()
    for strategy in _SHARING if machine.ranks > 1 else ():
        name = format_knobs(strategy, strategies())
        try:
            estimate = _estimate(model, strategy, machine, prompt, rows)
        except PartsongError as reason:
            refused.append(Refusal(name, str(reason)))
            continue
        if isinstance(strategy, LayerPipeline):  # so far it has its messages only
            step, whole = (_pipelined(strategy, rows, tokens, machine.ranks) for tokens in (rows, rows * prompt))
            estimate = replace(
                estimate,
                seconds=serial.seconds * step + estimate.seconds,
                prompt_seconds=serial.prompt_seconds * whole + estimate.prompt_seconds,
            )
        if fits(estimate.memory, machine.device):
            fitting.append(estimate)
        else:
            refused.append(Refusal(name, f"it needs {estimate.memory / 1e9:.1f} GB on a device"))
    ordered = sorted(fitting, key=lambda each: (each.seconds, each.strategy))
    return TextAdvice(tuple(ordered), tuple(refused), serial, fits(serial.memory, machine.device))


def _pipelined(strategy: LayerPipeline, rows: int, tokens: int, ranks: int) -> float:
    """Returns how long a call takes with its parts in flight, as a share of what it takes on one device."""
    parts = strategy.parts_of(rows, tokens)
    return (parts + ranks - 1) / (parts * ranks)


def _estimate(model: Any, strategy: Strategy | None, machine: Machine, prompt: int, rows: int) -> TextEstimate:
    sharing = [] if strategy is None else [strategy]
    # The ranks between have as much as one of these.
    ranks = sorted({0, machine.ranks - 1})
    traced = [_traced(model, sharing, machine, rank, prompt, rows) for rank in ranks]
    only_messages = isinstance(strategy, LayerPipeline)
    seconds = [
        [_seconds(call, machine, rank, only_messages) for call in calls]
        for rank, calls in zip(ranks, traced, strict=True)
    ]
    peak = max(traced, key=lambda calls: calls[1].weights + max(calls[0].working, calls[1].working))
    return TextEstimate(
        strategy="serial" if strategy is None else format_knobs(strategy, strategies()),
        ranks=machine.ranks,
        prompt_seconds=max(each[0] for each in seconds),
        seconds=max(each[1] for each in seconds),
        rows=rows,
        bytes_sent=max(sum(part.sent for part in calls[1].steady) for calls in traced),
        weights=max(calls[1].weights for calls in traced),
        keys=max(calls[0].kept for calls in traced),
        memory=peak[1].weights + max(peak[0].working, peak[1].working),
    )


def _seconds(call: CallTrace, machine: Machine, rank: int, only_messages: bool) -> float:
    taken = replay(call, machine, rank=rank).steady
    return taken - replay(call.silent(), machine, rank=rank).steady if only_messages else taken


def _traced(
    model: Any, sharing: Sequence[Strategy], machine: Machine, rank: int, prompt: int, rows: int
) -> tuple[CallTrace, CallTrace]:
    """Traces the reading of the prompts and the step of a token on one rank."""
    recorder = Recorder([], None)
    ids = torch.empty(rows, prompt, dtype=torch.int64, device="meta")
    given = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
    fused, calls = not machine.device.host, list[CallTrace]()
    with TextRun(model, sharing, machine.ranks, rank, given, network=recorder, experts=True, fused=fused) as run:
        weights = sum(each.nbytes for each in {id(each): each for each in model.parameters()}.values())
        weights, kept, cache = weights - run.plan.spared(), 0, None
        for tokens in (ids, ids[:, :1]):
            with LiveBytes(run.state.values()) as live:
                recorder.begin_call()
                with recorder:
                    cache = returned_cache(run.call(input_ids=tokens, **{cache_name(model): cache}))
                recorder.begin_call()
            before, kept = kept, sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
            calls.append(CallTrace(recorder.calls[-1], recorder.calls[-1], 0, before + live.peak, weights, kept))
    return calls[0], calls[1]
