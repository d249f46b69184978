"""Runs on every rank: tiny pipelines with lagged layers, and a twin written down with hooks of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor

from partsong import CfgParallel, LaggedLayers
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import gathered

STEPS = 7
#: Pipelines of two calls in a step, of one, and of two lists of blocks, with so many blocks.
BLOCKS = {"Wan": 2, "SD3": 3, "Flux": 2}
KNOBS: dict[str, dict[str, Any]] = {
    "held": {"order": 0, "warmup_steps": 2},
    "extrapolated": {"order": 1, "warmup_steps": 3},
    "window": {"order": 1, "warmup_steps": 2, "window": 3},
    "as it comes": {"warmup_steps": 1},
    "stride": {"order": 0, "warmup_steps": 1, "stride": 2},
    "all steps are warm-up": {"warmup_steps": STEPS},
}


@dataclass
class Made:
    """What became of a generation: pictures of every rank, and bytes that each one sent and was predicted to send."""

    outputs: list[Tensor]
    sent: list[int]
    predicted: list[int]


def pipeline(name: str) -> Any:
    """A tiny pipeline in float64."""
    return PIPES[name].make()


def call(name: str, pipe: Any) -> Tensor:
    """One generation."""
    return PIPES[name].call(pipe, num_inference_steps=STEPS)


def _made(name: str, strategies: tuple[Strategy, ...], mesh: Mesh) -> Made:
    pipe = pipeline(name)
    with parallelize(pipe, *strategies, mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            output = call(name, pipe)
        row = (output, int(ledger.summary()["bytes_sent"]), plan.explain().bytes_total()[mesh.rank])
    rows = gathered(row) if mesh.world_size > 1 else [row]
    return Made(*map(list, zip(*rows, strict=True)))


def run(nproc: int, some: Collection[tuple[str, str]] | None) -> dict[tuple[str, str], Made]:
    """Every pipeline with all knobs or some cases, in two runs of blocks, and in three where there are enough."""
    logging.set_verbosity_error()
    results = {}
    with Mesh(**mesh_for((LaggedLayers(),), nproc)) as mesh:
        for name, blocks in BLOCKS.items():
            components = min(blocks, max(2, nproc))
            if nproc <= components:
                for label, knobs in KNOBS.items():
                    if some is not None and (name, label) not in some:
                        continue
                    results[name, label] = _made(name, (LaggedLayers(components=components, **knobs),), mesh)
        if nproc < 3:
            results["SD3", "three"] = _made("SD3", (LaggedLayers(components=3, warmup_steps=2),), mesh)
    if nproc == 4:
        results["Wan", "guidance"] = _beside_guidance()
    return results


def _beside_guidance() -> Made:
    both = (LaggedLayers(degree=2, **KNOBS["extrapolated"]), CfgParallel(degree=2))
    with Mesh(**mesh_for(both, 4)) as mesh:
        return _made("Wan", both, mesh)


class Twin:
    """The lagged network as its definition has it, on one process and for one chain of blocks.

    Args:
        blocks: the chain.
        starts: numbers of the blocks at which a run other than the first begins.
        knobs: of `LaggedLayers`.
        pipe: the pipeline, whose scheduler tells the timesteps.
    """

    def __init__(self, blocks: list[Any], starts: list[int], knobs: LaggedLayers, pipe: Any) -> None:
        self.blocks, self.starts, self.knobs, self.scheduler = blocks, starts, knobs, pipe.scheduler
        self.calls = 0
        self.order = knobs.order if knobs.order is not None else int(len(starts) == 1)
        self.embedding: dict[str, Tensor] = {}
        self.added: dict[int, list[tuple[int, dict[str, Tensor]]]] = defaultdict(list)
        self.output: Any = None

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Puts hooks on a model that is called once in a step."""
        handles = [self.blocks[0].register_forward_pre_hook(self._embed, with_kwargs=True)]
        handles += [
            self.blocks[start].register_forward_pre_hook(self._swap(start), with_kwargs=True) for start in self.starts
        ]
        original = model.forward

        def forward(*args: Any, **named: Any) -> Any:
            lag = self.calls - self.knobs.warmup_steps
            if self.output is None or not self._lags() or lag % self.knobs.stride == 0:
                self.output = original(*args, **named)
            self.calls += 1
            return self.output

        model.forward = forward
        try:
            yield
        finally:
            del model.forward
            for handle in handles:
                handle.remove()

    def _lags(self) -> bool:
        lag = self.calls - self.knobs.warmup_steps
        return lag >= 0 and (self.knobs.window is None or lag < self.knobs.window)

    def _embed(self, block: Any, args: Any, named: dict[str, Any]) -> None:
        self.embedding = {name: named[name].clone() for name in ("hidden_states", "encoder_hidden_states")}

    def _swap(self, start: int) -> Any:
        def hook(block: Any, args: Any, named: dict[str, Any]) -> Any:
            added = {name: named[name] - embedding for name, embedding in self.embedding.items()}
            known, self.added[start] = self.added[start], [*self.added[start][-1:], (self.calls, added)]
            return args, {**named, **self._read(known)} if self._lags() else named

        return hook

    def _read(self, known: list[tuple[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
        last_step, last = known[-1]
        if self.order == 0 or len(known) < 2:
            return {name: self.embedding[name] + last[name] for name in last}
        times = self.scheduler.timesteps.double()
        before_step, before = known[0]
        ratio = min(2.0, float((times[self.calls] - times[last_step]) / (times[last_step] - times[before_step])))
        ahead = {name: last[name] + ratio * (last[name] - before[name]) for name in last}
        return {name: self.embedding[name] + ahead[name] for name in last}


def twin(knobs: LaggedLayers) -> Tensor:
    """What the definition makes of the SD3 pipeline, in as many runs as it has blocks or in two."""
    pipe = pipeline("SD3")
    blocks = list(pipe.transformer.transformer_blocks)
    starts = [1, 2] if knobs.components == len(blocks) else [2]
    with Twin(blocks, starts, knobs, pipe).attached(pipe.transformer), torch.no_grad():
        return call("SD3", pipe)


def refused(nproc: int) -> list[str]:
    """What every one of some ranks says to `LaggedLayers` in two runs of blocks."""
    strategy = LaggedLayers(components=2)
    with Mesh(**mesh_for((strategy,), nproc)) as mesh:
        try:
            parallelize(pipeline("SD3"), strategy, mesh=mesh)
        except ValueError as problem:
            return gathered(f"{type(problem).__name__}: {problem}")
        return gathered("accepted")
