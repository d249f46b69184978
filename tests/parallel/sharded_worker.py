"""Runs on every rank: models whose blocks' weights are shared out, alone and beside other strategies."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from partsong import CfgParallel, DataParallel, DisplacedPatch, Ring, ShardedWeights, SyncPatch, Ulysses
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.cuts.batch import GuidancePair
from partsong.parallel.cuts.block_units import find_units
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks import stops
from partsong.parallel.ranks.health import operation
from tests.parallel.ranks import error, gathered
from tests.parallel.tensor_worker import STEPS, build, calls
from tests.parallel.unets import UNETS

MODELS = ("Flux", "Wan", "Lumina2")
MIXES: dict[str, tuple[Strategy, ...]] = {
    "alone": (ShardedWeights(),),
    "Ulysses": (Ulysses(), ShardedWeights()),
    "CfgParallel x Ring": (CfgParallel(degree=2), ShardedWeights(), Ring()),
    "DataParallel x Ulysses": (ShardedWeights(), DataParallel(degree=2), Ulysses(degree=2)),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=len(STEPS)), ShardedWeights()),
}


def gathered_blocks(nproc: int) -> list[dict[str, Any]]:
    """How many blocks of a UNet are whole at the same time, and what is left of the weights that somebody holds."""
    strategies = (SyncPatch(), ShardedWeights())
    unet = UNETS["SD"]
    with Mesh(**mesh_for(strategies, nproc)) as mesh, torch.no_grad():
        model, named = unet.model(torch.float64), unet.calls((16, 16), torch.float64, (900.0,))[0]
        want = model(**named).sample
        held = [*model.parameters()]
        with parallelize(model, *strategies, mesh=mesh) as plan:
            units = find_units(model, plan.denoisers[0].adapter)
            freed = sum(weight.numel() == 0 for weight in held)
            most = [0]
            watches = [unit.register_forward_pre_hook(_counting(units, most)) for unit in units]
            errors = [error(model(**named).sample, want) for _ in range(2)]
            for watch in watches:
                watch.remove()
        classes = {type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)}
        marks = [key for module in model.modules() for key in vars(module) if "fsdp" in key]
        same = all(now is before for now, before in zip(model.parameters(), held, strict=True))
        again = torch.equal(model(**named).sample, want)
        return gathered(
            {
                **{"errors": errors, "most": most[0], "units": len(units), "freed": freed},
                **{"classes": classes, "marks": marks, "same": same, "again": again},
            }
        )


def _counting(units: list[nn.Module], most: list[int]) -> Any:
    def count(module: nn.Module, args: Any) -> None:
        whole = [unit for unit in units if not any("DTensor" in type(w).__name__ for w in unit.parameters())]
        most[0] = max(most[0], len(whole))

    return count


def moved(nproc: int) -> list[dict[str, Any]]:
    """Weights that are cast under a plan."""
    with Mesh(data=nproc) as mesh, torch.no_grad():
        model = build("SD3")
        want = sample_of(model(**calls("SD3")[0]))
        with parallelize(model, ShardedWeights(), mesh=mesh):
            model.float()
            named = {name: _single(value) for name, value in calls("SD3")[0].items()}
            apart = error(sample_of(model(**named)).double(), want)
        types = {parameter.dtype for parameter in model.parameters()}
        return gathered({"error": apart, "types": types})


def _single(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def without_a_layer(nproc: int) -> list[list[float]]:
    """Calls that leave a block out whose weights were gathered ahead, between calls that do not."""
    with Mesh(data=nproc) as mesh, torch.no_grad():
        model, named = build("SD3"), calls("SD3")[0]
        skips: list[list[int] | None] = [None, [1], [0], None]
        wanted = [sample_of(model(**named, skip_layers=skip)) for skip in skips]
        with parallelize(model, ShardedWeights(), mesh=mesh):
            got = [sample_of(model(**named, skip_layers=skip)) for skip in skips]
        return gathered([error(*pair) for pair in zip(got, wanted, strict=True)])


def after_an_error(nproc: int) -> list[dict[str, Any]]:
    """Errors after a call, one of them an interruption, on every rank at the same point."""
    with Mesh(ulysses=nproc) as mesh, torch.no_grad():
        model, named = build("SD3"), calls("SD3")[0]
        want, held = sample_of(model(**named)), [*model.parameters()]
        with (
            contextlib.suppress(ValueError, KeyboardInterrupt),
            parallelize(model, ShardedWeights(), Ulysses(), mesh=mesh),
        ):
            model(**named)
            raise KeyboardInterrupt if mesh.rank else ValueError
        same = all(now is before for now, before in zip(model.parameters(), held, strict=True))
        return gathered({"same": same and torch.equal(sample_of(model(**named)), want), "clean": _is_clean(model)})


def after_an_error_on_one(nproc: int) -> list[dict[str, Any]]:
    """An error on the first rank while the others wait for its message: what is said of the model, and how soon."""
    stops.TIMEOUT /= 4  # it is how long the first one is patient, not whether
    with Mesh(ulysses=nproc) as mesh, torch.no_grad():
        model, start = build("SD3"), 0.0
        with contextlib.suppress(ValueError), parallelize(model, ShardedWeights(), Ulysses(), mesh=mesh):
            model(**calls("SD3")[0])
            start = time.monotonic()
            if mesh.rank:
                _late_message()
            raise ValueError("only here at first")
        seconds = time.monotonic() - start
        if not mesh.rank:
            _late_message()
        try:
            said = str(model(**calls("SD3")[0]))
        except PartsongError as problem:
            said = str(problem)
        return gathered({"said": said, "clean": _is_clean(model), "seconds": seconds})


def _late_message() -> None:
    with operation("a late message", (0,)):
        dist.broadcast(torch.ones(1), 0)


def _is_clean(model: nn.Module) -> bool:
    return not any(isinstance(part, FSDPModule) for part in model.modules())


def repeated(nproc: int) -> list[dict[str, Any]]:
    """How often each rank calls the model for three branches of guidance."""
    with Mesh(cfg=nproc) as mesh:
        counts = {}
        for is_even in (False, True):
            ran: list[int] = []
            pair = GuidancePair(mesh.axis("cfg"), StepClock(), "sample", is_even=is_even)

            def forward(sample: torch.Tensor, ran: list[int] = ran) -> tuple[torch.Tensor]:
                ran.append(int(sample))
                return (sample * 10,)

            branches = [{"sample": torch.tensor([float(n)])} for n in range(3)]
            answers = [float(output[0]) for output in pair.share(forward, branches)]
            counts[is_even] = (ran, answers)
        return gathered(counts)


def releases(nproc: int) -> list[bool]:
    """Whether a model can be collected once its plan is undone."""
    with Mesh(ulysses=nproc) as mesh, torch.no_grad():
        model = build("SD3")
        gone = weakref.ref(model)
        with parallelize(model, ShardedWeights(), Ulysses(), mesh=mesh), Ledger(flops=False):
            model(**calls("SD3")[0])
        del model
        import gc

        gc.collect()
        return gathered(gone() is None)
