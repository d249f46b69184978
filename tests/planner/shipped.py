"""Writes partsong/planner/traces: ``python -m tests.planner.shipped`` traces all published models, or those named."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Sequence
from typing import Any

from partsong.errors import PartsongError
from partsong.parallel.strategy import Strategy
from partsong.planner import MODELS, subject_named
from partsong.planner.calls import Size
from partsong.planner.decoding import decoding_of
from partsong.planner.mixes import mixes_for
from partsong.planner.shipped_traces import FOLDER, key_of, versions
from partsong.planner.steps import Tracer
from partsong.planner.subject import Subject
from partsong.planner.trace import CallTrace, trace_calls
from partsong.planner.trace_data import data_of

#: Numbers of devices that many people have; each adds half as much again to the files.
RANKS = (2, 4)


class Writing(Tracer):
    """Notes what tracing gives for each call that a plan asks for; nothing is read from files."""

    def __init__(self, subject: Subject) -> None:
        size = Size(height=subject.height, width=subject.width, frames=subject.frames, dtype=subject.dtype)
        super().__init__(subject, size)
        self.fresh: dict[str, CallTrace | PartsongError] = {}

    def _call(self, mix: Sequence[Strategy], ranks: int, samples: int) -> CallTrace:
        key = key_of(mix, ranks, samples)
        if key not in self.fresh:
            try:
                self.fresh[key] = trace_calls(
                    self.subject.denoiser, mix, ranks, self._inputs(samples), shapes=self._shapes
                )
            except PartsongError as reason:
                self.fresh[key] = reason
        outcome = self.fresh[key]
        if isinstance(outcome, PartsongError):
            raise outcome
        return outcome


def data_for(name: str, ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    """Traces a published model under the exact mixes for some numbers of ranks, and returns what its file has."""
    subject = subject_named(name)
    tracer = Writing(subject)
    for number in (1, *ranks):
        for mix in mixes_for(subject, number, 1, exact=True):
            try:
                tracer.trace([strategy for strategy in mix if strategy.denoises], number, subject.steps)
            except PartsongError:
                continue  # noted as refused, or refused for reasons that need no tracing
    assert subject.coder is not None
    cost = decoding_of(subject.coder.build(), subject.coder.channels, subject.coder.clip)
    decoding = [list(map(list, cost.work)), cost.pixels, cost.peak, cost.weights]
    traces = {key: made for key, made in tracer.fresh.items() if isinstance(made, CallTrace)}
    reasons = {key: reason for key, reason in tracer.fresh.items() if isinstance(reason, PartsongError)}
    refused = {key: [type(reason).__name__, str(reason)] for key, reason in reasons.items()}
    return {"versions": versions(), "decoding": decoding, "refused": refused, **data_of(traces)}


def write(name: str) -> None:
    """Writes the file of a model."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(data_for(name), separators=(",", ":"))
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    for model in sys.argv[1:] or MODELS:
        print(model)
        write(model)
