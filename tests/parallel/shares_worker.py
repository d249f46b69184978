"""Runs on every rank: uneven cuts by the shares of the ranks, against one rank and against what is predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from partsong import (
    CfgParallel,
    DisplacedPatch,
    DynamicSequence,
    ParallelVae,
    PartialPatch,
    Ring,
    SyncPatch,
    TensorParallel,
    TokenRing,
    Ulysses,
    Usp,
    measure_shares,
)
from partsong.errors import ArgumentError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.autoencoders import VAES, result
from tests.parallel.families import FAMILIES, dit
from tests.parallel.ranks import error, gathered, staying_connected
from tests.parallel.unets import UNETS

#: Shares by number of ranks. Those of four are unlike in every pair, and no product of two pairs.
SHARES: dict[int, tuple[float, ...]] = {2: (1, 2.5), 3: (3, 1, 1.5), 4: (4, 1, 2, 1.5)}
STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "Ulysses": (Ulysses(),),
    "Ring": (Ring(),),
    "Usp": (Usp(),),
    "TokenRing": (TokenRing(),),
    "DynamicSequence": (DynamicSequence(),),
    "SyncPatch": (SyncPatch(),),
    # Every call of a model is the same one, and so old keys and rows are as good as fresh ones.
    "DisplacedPatch": (DisplacedPatch(warmup_steps=1),),
    "PartialPatch": (PartialPatch(portion=0.6),),
    "PartialPatch of all": (PartialPatch(portion=3.0),),
    "Usp of pairs": (Usp(ulysses_degree=2, ring_degree=2),),
    "CfgParallel x Ulysses": (CfgParallel(), Ulysses()),
    "TensorParallel x Ring": (TensorParallel(degree=2), Ring()),
}
#: Of two and three ranks, and of four.
SINGLE = [name for name in STRATEGIES if "of pairs" not in name and " x " not in name]
FOUR = [name for name in STRATEGIES if name not in SINGLE]
MODELS = tuple(
    name for name in ("DiT", "Flux", "SD3", "HunyuanVideo", "Latte", "SD", "SDXL", "Krea 2") if name in FAMILIES
)
#: What a case is made of: number of ranks, strategy, model.
Case = tuple[int, str, str]


def has_form(strategy: str, model: str) -> bool:
    """Whether the strategies know the model at all."""
    if model in UNETS:
        return "DynamicSequence" not in strategy and "Tensor" not in strategy
    row = _row(model)
    # Where tokens are cut too, heads must divide evenly; those of Krea 2 do.
    divides = "Tensor" not in strategy or model == "Krea 2"
    return divides and not any(each.refuses(row) for each in STRATEGIES[strategy])


def _row(name: str) -> Any:
    from partsong.parallel import ADAPTERS

    return ADAPTERS[type(FAMILIES[name].build(6)).__name__]


def _model(name: str) -> tuple[Any, dict[str, Any]]:
    if name in UNETS:
        return UNETS[name].model(torch.float64), UNETS[name].calls((28, 12), torch.float64, (9.0,))[0]
    return FAMILIES[name].model(8, torch.float64), FAMILIES[name].call(8, 2, torch.float64)


@staying_connected
def matrix(nproc: int, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """Three equal calls in each case: distance from one rank, bytes counted and predicted, and what the cut is."""
    logging.set_verbosity_error()
    results = {}
    for _, label, name in cases:
        chosen, (model, named) = STRATEGIES[label], _model(name)
        with torch.no_grad():
            want = sample_of(model(**named))
            with Mesh(**mesh_for(chosen, nproc), shares=SHARES[nproc]) as mesh:
                with parallelize(model, *chosen, mesh=mesh) as plan, Ledger(flops=False) as ledger:
                    got = [sample_of(model(**named)) for _ in range(3)]
                    told, cut = plan.explain(), plan.denoisers[0].cut
                row = (max(error(each, want) for each in got), int(ledger.summary()["bytes_sent"]))
                rows = gathered(row)
        results[nproc, label, name] = {
            "error": max(row[0] for row in rows),
            "last error": error(got[-1], want),
            "counted": [row[1] for row in rows],
            "predicted": told.bytes_total(),
            "split": told.split,
            "sizes": dict(cut.sizes) if cut is not None else {},
        }
    return results


def autoencoders(nproc: int) -> dict[str, dict[str, Any]]:
    """An autoencoder cut into rows, and one cut into tiles of which all but one are as high as it is."""
    results = {}
    with Mesh(data=nproc, shares=SHARES[nproc]) as mesh:
        for name in list(VAES)[:1]:
            vae = VAES[name].make(torch.float64)
            calls = VAES[name].calls(vae, 1)
            want = [result(vae, *call) for call in calls]
            with parallelize(vae, ParallelVae(), mesh=mesh) as plan, Ledger(flops=False) as ledger:
                got = [result(vae, *call) for call in calls]
                told = plan.explain()
            errors = gathered(max(map(error, got, want)))
            counted = gathered(int(ledger.summary()["bytes_sent"]))
            results[name] = {"error": max(errors), "counted": counted, "told": told.bytes_total(), "split": told.split}
    return results


def refusals(nproc: int) -> list[dict[str, str]]:
    """What every rank is told."""
    rank_of = lambda mesh: float(mesh.rank + 1)  # noqa: E731
    model = FAMILIES["DiT"].model(8, torch.float64)
    small, named = FAMILIES["DiT"].model(8, torch.float64), FAMILIES["DiT"].call(8, 1, torch.float64)
    trials: dict[str, Callable[[Mesh], Any]] = {
        "too few": lambda mesh: Mesh(ulysses=nproc, shares=(1.0,)),
        "zero": lambda mesh: Mesh(ulysses=nproc, shares=(0.0,) * nproc),
        "not numbers": lambda mesh: Mesh(ulysses=nproc, shares="21"),
        "other on every rank": lambda mesh: Mesh(ulysses=nproc, shares=(rank_of(mesh), *(9.0,) * (nproc - 1))),
        "no use": lambda mesh: parallelize(model, CfgParallel(), mesh=Mesh(cfg=nproc, shares=SHARES[nproc])),
        "idle": lambda mesh: measure_shares(mesh, lambda: None, clock=lambda: 0.0),
        "no rounds": lambda mesh: measure_shares(mesh, repeats=0),
    }
    told = {}
    with Mesh(ring=nproc) as mesh:
        for name, trial in trials.items():
            try:
                trial(mesh)
                told[name] = "accepted"
            except ArgumentError as problem:
                told[name] = str(problem)
        with torch.no_grad(), parallelize(small, Ring(), mesh=Mesh(ring=nproc, shares=(1.0,) * nproc)):
            told["alike"] = f"{type(small(**named)).__name__}"
        return gathered(told)


# --- a rank that is slow ---------------------------------------------------------------------------------------------


@dataclass
class Heavy:
    """Makes a block compute its feed-forward layer several times: a processor of a fraction of the speed."""

    times: int

    def attach(self, model: Any, stack: ExitStack) -> None:
        """Puts it on all blocks, until the stack closes."""
        for block in model.transformer_blocks:
            stack.callback(block.ff.register_forward_hook(self.repeat).remove)

    def repeat(self, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        for _ in range(self.times):
            for part in layer.net:  # not the layer itself, whose hook this is
                given = (part(*given),)
            given = (given[0][..., : output.shape[-1]],)


def slowed(nproc: int, times: int) -> list[dict[str, Any]]:
    """One rank does a multiple of the work: measured shares, and operations per step, in even parts and by shares.

    Shares are measured in processor seconds. Operations are counted, and no other program changes their number.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = dit(32, num_attention_heads=6, attention_head_dim=32).eval()
    named = {
        "hidden_states": torch.randn(1, 4, 32, 32),
        "timestep": torch.tensor([9]),
        "class_labels": torch.tensor([1]),
    }
    with Mesh(ulysses=nproc) as mesh, torch.no_grad(), ExitStack() as stack:
        want = model(**named).sample
        if mesh.rank == nproc - 1:
            Heavy(times).attach(model, stack)
        shares = measure_shares(mesh, lambda: model(**named), clock=time.thread_time)
        busy, tokens, apart = {}, {}, []
        for label, given in {"even": None, "by shares": shares}.items():
            with parallelize(model, Ulysses(), mesh=Mesh(ulysses=nproc, shares=given)) as plan:
                with FlopCounterMode(display=False) as counter:
                    apart.append(error(model(**named).sample, want))
                cut = plan.denoisers[0].cut
                assert cut is not None
                tokens[label] = cut.sizes["image"]
            busy[label] = counter.get_total_flops()
        return gathered({"shares": shares, "busy": busy, "tokens": tokens, "error": max(apart)})
