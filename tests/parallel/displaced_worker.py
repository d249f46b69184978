"""Runs on every rank: DisplacedPatch after its warm-up, against its definition simulated in one process.

Order 0: keys and values of the other ranks are those of the step before. Order 1: from the third step on they lie on
the line through the two steps before, carried on by the ratio of the time steps, which is at most 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partsong.parallel import DisplacedPatch, Mesh, parallelize
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error, gathered

TIMES = (900, 800, 500, 450, 100)
#: warm-up steps, calls of the model per step, order of the forecast
CASES = ((1, 1, 0), (2, 1, 0), (3, 2, 0), (1, 1, 1), (3, 2, 1), (len(TIMES), 1, 1))


class Simulated:
    """A DiT block's self-attention in which every rank's tokens see fresh own keys and old ones of the others.

    Written from the definition, with full-length tensors and dense weights; knows nothing of ranks or messages.
    """

    def __init__(self, parts: int, warmup: int, order: int) -> None:
        self.parts, self.warmup, self.order = parts, warmup, order
        self.step, self.branch = 0, 0
        self.past: dict[tuple[int, int, int], Tensor] = {}

    def owner(self, tokens: int) -> Tensor:
        """The rank of each token: runs as even as can be, longer ones first."""
        runs = torch.arange(tokens).tensor_split(self.parts)
        return torch.cat([torch.full((len(run),), rank) for rank, run in enumerate(runs)])

    def remembered(self, layer: int, fresh: Tensor) -> Tensor:
        """What a rank knows of the others' keys and values in this step."""
        self.past[layer, self.branch, self.step] = fresh
        if self.step < self.warmup:
            return fresh
        last = self.past[layer, self.branch, self.step - 1]
        if self.order == 0 or self.step < 2:
            return last
        older, (before, then, now) = self.past[layer, self.branch, self.step - 2], TIMES[self.step - 2 : self.step + 1]
        return last + min((now - then) / (then - before), 2.0) * (last - older)

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v = (f(hidden_states).unflatten(2, (attn.heads, -1)) for f in (attn.to_q, attn.to_k, attn.to_v))
        old_k, old_v = self.remembered(id(attn), torch.stack((k, v)))
        owner = self.owner(q.shape[1])
        own = (owner[:, None] == owner[None, :])[None, None]
        scale = q.shape[-1] ** -0.5
        fresh, stale = (torch.einsum("blhd,bmhd->bhlm", q, keys) * scale for keys in (k, old_k))
        weights = torch.where(own, fresh, stale).softmax(-1)
        out = torch.einsum("bhlm,bmhd->blhd", weights * own, v)
        out = out + torch.einsum("bhlm,bmhd->blhd", weights * ~own, old_v)
        return attn.to_out[0](out.flatten(2))


def _calls(side: int, branches: int) -> list[dict[str, Any]]:
    """Every step has other latents and, per branch, another class; as a sampler would call."""
    calls = []
    for step, time in enumerate(TIMES):
        named = FAMILIES["DiT"].call(side, 2, torch.float64, seed=70 + step)
        for branch in range(branches):
            labels = (named["class_labels"] + 3 * branch) % 10
            calls.append({**named, "timestep": torch.full((2,), time), "class_labels": labels})
    return calls


def _simulate(side: int, parts: int, warmup: int, branches: int, order: int) -> list[Tensor]:
    model = FAMILIES["DiT"].model(side, torch.float64)
    attention = Simulated(parts, warmup, order)
    for block in model.transformer_blocks:
        block.attn1.set_processor(attention)
    outputs = []
    for number, call in enumerate(_calls(side, branches)):
        attention.step, attention.branch = divmod(number, branches)
        outputs.append(model(**call).sample)
    return outputs


def run(nproc: int) -> dict[tuple[int, int, int], list[list[dict[str, Any]]]]:
    """For each case, rank and generation: the distance from the definition and from the serial model, by step."""
    torch.set_num_threads(1)
    results = {}
    with Mesh(patch=nproc) as mesh, torch.no_grad():
        for case in CASES:
            warmup, _, order = case
            model = FAMILIES["DiT"].model(6, torch.float64)
            with parallelize(model, DisplacedPatch(warmup_steps=warmup, order=order), mesh=mesh):
                results[case] = gathered([_generation(model, nproc, *case) for _ in range(2)])
    return results


def _generation(model: Any, nproc: int, warmup: int, branches: int, order: int) -> dict[str, list[float]]:
    got = [model(**call).sample for call in _calls(6, branches)]
    want = _simulate(6, nproc, warmup, branches, order)
    serial = _simulate(6, 1, warmup, branches, order)
    errors = [error(g, w) for g, w in zip(got, want, strict=True)]
    drifts = [error(g, s) for g, s in zip(got, serial, strict=True)]
    return {
        "error": [max(errors[i : i + branches]) for i in range(0, len(got), branches)],
        "drift": [min(drifts[i : i + branches]) for i in range(0, len(got), branches)],
    }
