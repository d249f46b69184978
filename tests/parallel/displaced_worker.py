"""Runs on every rank: DisplacedPatch after its warm-up, against its definition simulated in one process.

Order 0: keys and values of the other ranks are those of the step before. Order 1: from the third step on they lie on
the line through the two steps before, carried on by the ratio of the time steps, which is at most 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partsong import DisplacedPatch
from partsong.parallel import Mesh, parallelize
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error, gathered, on_first

TIMES = (900, 800, 500, 450, 100)
Order = Literal[0, 1]
#: warm-up steps, calls of the model per step, order of the forecast
CASES: tuple[tuple[int, int, Order], ...] = (
    (1, 1, 0),
    (2, 1, 0),
    (3, 2, 0),
    (1, 1, 1),
    (3, 2, 1),
    (len(TIMES), 1, 1),
)
#: Token streams of every attention of one forward, in order; None is one that no rank shares.
STREAMS: dict[str, list[tuple[str, ...] | None]] = {
    "DiT": [("image",)] * 2,
    "PixArt masked": [("image",), None] * 2,
    "SD3": [("image", "text"), ("image",), ("image", "text"), ("image", "text")],
    "Flux": [("text", "image")] * 3,
}


class Simulated(TorchFunctionMode):
    """Attention in which every rank's tokens see fresh own keys and old ones of the others.

    Written from the definition, with full-length tensors and dense weights; knows nothing of ranks or messages.

    Args:
        parts: the ranks.
        warmup: steps in which all is fresh.
        order: of the forecast.
        streams: what each attention mixes, as in `STREAMS`.
        merged: tokens are cut into this many times more runs, which neighbours put together again.
    """

    def __init__(
        self, parts: int, warmup: int, order: int, streams: Sequence[tuple[str, ...] | None], merged: int = 1
    ) -> None:
        super().__init__()
        self.parts, self.warmup, self.order, self.merged = parts, warmup, order, merged
        self.streams = streams
        self.step, self.branch, self.text, self.calls = 0, 0, 0, 0
        self.past: dict[tuple[int, int, int], Tensor] = {}

    def begin(self, step: int, branch: int, text: int) -> None:
        """Notes that a forward begins, with this many tokens of text."""
        self.step, self.branch, self.text, self.calls = step, branch, text, 0

    def rows(self, layer: int, length: int) -> list[list[tuple[str, int]]]:
        """The tokens of each rank in order: their stream, and their place among all; longer runs come first."""
        streams, start, runs = self.streams[layer] or (), 0, []
        for stream in streams:
            count = self.text if stream == "text" else length - self.text * ("text" in streams)
            pieces = (start + torch.arange(count)).tensor_split(self.parts * self.merged)
            runs.append([[(stream, place) for place in piece.tolist()] for piece in pieces])
            start += count
        by_piece = [list(chain(*pieces)) for pieces in zip(*runs, strict=True)]
        return [list(chain(*by_piece[rank * self.merged :][: self.merged])) for rank in range(self.parts)]

    def remembered(self, layer: int, rank: int, rows: Sequence[list[tuple[str, int]]]) -> Tensor:
        """What a rank knows of all keys and values in this step; its own are put in later."""
        if self.step < self.warmup:
            return self.past[layer, self.branch, self.step]
        last = self.past[layer, self.branch, self.step - 1]
        if self.order == 0 or self.step < 2:
            return last
        older, (before, then, now) = self.past[layer, self.branch, self.step - 2], TIMES[self.step - 2 : self.step + 1]
        return last + min((now - then) / (then - before), 2.0) * (last - older)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        layer, self.calls = self.calls, self.calls + 1
        if self.streams[layer] is None:
            return func(*args, **(kwargs or {}))
        return self.attend(layer, *args, **(kwargs or {}))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        fresh = self.past[layer, self.branch, self.step] = torch.stack((key, value))
        rows, out = self.rows(layer, query.shape[2]), torch.empty_like(query)
        for rank in range(self.parts):
            own = [place for _, place in rows[rank]]
            known = self.remembered(layer, rank, rows).clone()
            known[..., own, :] = fresh[..., own, :]
            logits = query[:, :, own] @ known[0].mT * query.shape[-1] ** -0.5
            out[:, :, own] = (logits if attn_mask is None else logits + attn_mask).softmax(-1) @ known[1]
        return out


def calls_of(family: str, side: int, branches: int) -> list[dict[str, Any]]:
    """Every step has other latents and, per branch, another class or text; as a sampler would call."""
    calls = []
    for step, time in enumerate(TIMES):
        named = FAMILIES[family].call(side, 2, torch.float64, seed=70 + step)
        named["timestep"] = torch.full_like(named["timestep"], time / 1000 if family == "Flux" else time)
        for branch in range(branches):
            other = dict(named)
            if "class_labels" in named:
                other["class_labels"] = (named["class_labels"] + 3 * branch) % 10
            else:
                other["encoder_hidden_states"] = named["encoder_hidden_states"] + branch
            calls.append(other)
    return calls


def simulate(model: Any, calls: Sequence[dict[str, Any]], branches: int, attention: Simulated) -> list[Tensor]:
    """What the model answers when its attention is the simulated one."""
    outputs = []
    for number, call in enumerate(calls):
        text = call.get("encoder_hidden_states", torch.empty(0, 0)).shape[1]
        attention.begin(*divmod(number, branches), text)
        with attention:
            outputs.append(model(**call).sample)
    return outputs


def run(nproc: int, cases: list[tuple[int, int, Order]]) -> dict[tuple[int, int, int], list[list[dict[str, Any]]]]:
    """For some cases, each rank and generation: the distance from the definition and from the serial model, by step."""
    results = {}
    with Mesh(patch=nproc) as mesh, torch.no_grad():
        for case in cases:
            warmup, branches, order = case
            model = FAMILIES["DiT"].model(6, torch.float64)
            calls = calls_of("DiT", 6, branches)
            attentions = (Simulated(parts, warmup, order, STREAMS["DiT"]) for parts in (nproc, 1))
            want, serial = on_first(lambda: [simulate(model, calls, branches, each) for each in attentions])  # noqa: B023
            with parallelize(model, DisplacedPatch(warmup_steps=warmup, order=order), mesh=mesh) as plan:
                generations = [_generation(model, calls, branches, want, serial)]
                # In a pipeline the times of all steps are known beforehand, so ranks send forecasts of their rows.
                plan.clock.driven = True
                plan.clock.begin(TIMES)
                generations.append(_generation(model, calls, branches, want, serial, after=plan.clock.advance))
                results[case] = gathered(generations)
    return results


def _generation(
    model: Any,
    calls: Sequence[dict[str, Any]],
    branches: int,
    want: Sequence[Tensor],
    serial: Sequence[Tensor],
    after: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    got = []
    for number, call in enumerate(calls):
        got.append(model(**call).sample)
        if number % branches == branches - 1:
            after()
    errors = [error(g, w) for g, w in zip(got, want, strict=True)]
    drifts = [error(g, s) for g, s in zip(got, serial, strict=True)]
    return {
        "error": [max(errors[i : i + branches]) for i in range(0, len(got), branches)],
        "drift": [min(drifts[i : i + branches]) for i in range(0, len(got), branches)],
    }
