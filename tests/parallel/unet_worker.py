"""Runs on every rank: UNets cut into rows against the whole UNet."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from diffusers.utils import logging
from peft import LoraConfig
from torch import Tensor, nn

from partsong import DisplacedPatch, PartialPatch, SyncPatch, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import ADAPTERS, Mesh, Strategy, mesh_for, parallelize, predict
from partsong.parallel.cuts.rows import RowLevels, RowSplit
from partsong.parallel.exchange.displaced_borders import DisplacedBorders
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.collectives import agree, gather_tokens
from tests.covering import taking_turns
from tests.parallel.equivalence_worker import strategies
from tests.parallel.ranks import error, gathered, staying_connected
from tests.parallel.unets import UNET_PIPES, UNETS

DTYPES = {"float64": torch.float64, "float32": torch.float32}
TIMES = (900.0, 100.0)
#: A height that never halves evenly, and one that does so twice.
SIZES = {"odd": (21, 13), "even": (16, 16)}
#: UNets with blocks of their own. Displaced strategies are also tried on them with an input that stays as it is.
MODELS = ("IF", "Kandinsky", "AnimateDiff", "Text-to-video", "Stable Video Diffusion")
#: Those whose attention is of another form than Stable Diffusion's, so no columns of it are known.
NO_COLUMNS = ("IF", "Kandinsky")
#: What a case is made of: number of ranks, strategies, UNet, type and size; of pipelines: ranks, strategy, pipeline.
Case = tuple[int, str, str, str, str]
PipeCase = tuple[int, str, str]
PIPE_STRATEGIES: dict[str, Strategy] = {
    "SyncPatch": SyncPatch(),
    "Ulysses": Ulysses(),
    "DisplacedPatch": DisplacedPatch(warmup_steps=9),
}


@functools.cache
def _twin(name: str, dtype: torch.dtype, size: tuple[int, int]) -> tuple[Any, list[dict[str, Any]], list[Tensor]]:
    model, calls = UNETS[name].model(dtype), UNETS[name].calls(size, dtype, TIMES)
    with torch.no_grad():
        return model, calls, [model(**call).sample for call in calls]


def product(nproc: int) -> list[Case]:
    """Every strategy on the plain UNet on this number of ranks; single ones on other models, few on its variants."""
    few = ("SyncPatch", "CfgParallel", "DataParallel")
    return [
        (nproc, label, name, dtype, size)
        for label, chosen in strategies(nproc).items()
        if not any(strategy.refuses(ADAPTERS["UNet2DConditionModel"]) for strategy in chosen)
        for name in UNETS
        if name == "SD" or label in few or (name in MODELS and " x " not in label)
        if label != "TensorParallel" or name not in NO_COLUMNS
        for dtype in DTYPES
        for size in SIZES
    ]


#: Strategies that ask the same of a UNet: to cut its rows with all that is between them, or its weights. The batches of
#: every pipeline are cut in tests/pipelines.
KINDS = (
    ("SyncPatch", "Ulysses", "DisplacedPatch", "Ring", "PartialPatch", "Usp", "TokenRing", "LatentParallel"),
    ("ShardedWeights", "TensorParallel"),
)


def usual(nproc: int) -> list[Case]:
    """What the default run chooses from.

    The plain UNet meets every strategy, those that wait for rows and that do not in both types and sizes. On two ranks
    others meet one that cuts rows, and two of them one that cuts weights; what is put on the plain one has tests in
    tests/features and test_controlnets. On three ranks rows are uneven in another way; on four some compositions are
    tried, and what is not the same there as on three.
    """
    more = {
        3: ("SyncPatch", "DisplacedPatch", "Ulysses x 3 waves"),
        4: ("CfgParallel x Ulysses", "DisplacedPatch x Ulysses", "Usp"),
    }
    turns = taking_turns(MODELS, KINDS[:1]) | taking_turns(MODELS[:3:2], KINDS[1:])
    turns |= {("SyncPatch", name) for name in UNETS if name not in MODELS and " + " not in name}
    return [
        case
        for case in product(nproc)
        if case[3:] == ("float64", "odd") or (nproc < 3 and case[1] in ("SyncPatch", "DisplacedPatch"))
        if case[2] == "SD" or (nproc == 2 and case[1:3] in turns and case[3:] == ("float64", "odd"))
        if nproc < 3 or case[1] in more[nproc]
        if nproc > 1 or case[1] in ("CfgParallel", "SyncPatch")
    ]


def matrix(nproc: int, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """All these cases, which are on the ranks of this process."""
    logging.set_verbosity_error()
    meshes = strategies(nproc)
    with Mesh(data=nproc), torch.no_grad():  # keeps the ranks connected from one mesh to the next
        return {case: _case(case, meshes[case[1]], nproc) for case in cases}


def _case(case: Case, chosen: tuple[Strategy, ...], nproc: int) -> dict[str, Any]:
    _, _, name, dtype, size = case
    model, calls, want = _twin(name, DTYPES[dtype], SIZES[size])
    with Mesh(**mesh_for(chosen, nproc)) as mesh:
        with parallelize(model, *chosen, mesh=mesh) as plan, Ledger(flops=False) as ledger:
            got = [model(**call).sample for call in calls]
            predicted = plan.explain().bytes_total()
        again = model(**calls[0]).sample
        mine = [max(map(error, got, want)), ledger.summary()["bytes_sent"], float(torch.equal(again, want[0]))]
        table = agree(mesh.axis(*mesh.degrees), mine)
    return {
        "error": max(row[0] for row in table),
        "counted": [int(row[1]) for row in table],
        "predicted": predicted,
        "restored": all(row[2] == 1.0 for row in table),
    }


@staying_connected
def pipelines(nproc: int, cases: list[PipeCase]) -> dict[PipeCase, list[Any]]:
    """Real pipelines: every rank's error, whether bytes are as predicted, whether the pipeline is clean afterwards."""
    logging.set_verbosity_error()
    results = {}
    for case in cases:
        pipe_of = UNET_PIPES[case[2]]
        pipe = pipe_of.make()
        want = pipe_of.call(pipe)
        with parallelize(pipe, PIPE_STRATEGIES[case[1]]) as plan, Ledger(flops=False) as ledger:
            got = pipe_of.call(pipe)
            told = plan.explain().bytes_total()[plan.mesh.rank] == ledger.summary()["bytes_sent"]
            row = gathered((error(got, want), told, not hasattr(pipe.unet.conv_out, "_diffusers_hook")))
        clean = not any(hasattr(module, "_diffusers_hook") for module in pipe.unet.modules())
        results[case] = [(*values, clean) for values in row]
    return results


@staying_connected
def convergence(nproc: int) -> dict[tuple[int, float], float]:
    """The error of a displaced step for an order and a size of step."""
    model, results = UNETS["SD"].model(torch.float64), {}
    for order in (0, 1):
        for size in (1e-1, 1e-2):
            calls = UNETS["SD"].calls((16, 16), torch.float64, (900.0, 900.0 - size, 900.0 - 2 * size))
            base, change = calls[0]["sample"], calls[1]["sample"] - calls[0]["sample"]
            calls = [call | {"sample": base + size * index * change} for index, call in enumerate(calls)]
            with torch.no_grad():
                want = [model(**call).sample for call in calls]
                with parallelize(model, DisplacedPatch(warmup_steps=2, order=order)):
                    got = [model(**call).sample for call in calls]
            assert max(map(error, got[:2], want[:2])) < 1e-12
            results[order, size] = error(got[2], want[2])
    return results


#: Strategies that read what is old, as far as they leave nothing out.
OLD: dict[str, Strategy] = {"DisplacedPatch": DisplacedPatch(warmup_steps=2), "PartialPatch": PartialPatch(portion=2.0)}


@staying_connected
def unchanged(nproc: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[float, bool]]:
    """The error of the last of three equal calls, where old is as good as new, and whether bytes are as told."""
    results = {}
    for name, label in cases:
        model, calls = UNETS[name].model(torch.float64), UNETS[name].calls((20, 12), torch.float64, (9.0,)) * 3
        with torch.no_grad():
            want = model(**calls[0]).sample
            with parallelize(model, OLD[label]) as plan, Ledger(flops=False) as ledger:
                got = [model(**call).sample for call in calls][-1]
                told = plan.explain().bytes_total()[plan.mesh.rank] == ledger.summary()["bytes_sent"]
                rows = gathered((error(got, want), told))
        results[name, label] = max(row[0] for row in rows), all(row[1] for row in rows)
    return results


#: Stands for order 1 with norms that are waited for.
FRESH = 2
LAYERS = {
    "convolution": lambda: nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64),
    "wide convolution": lambda: nn.Conv2d(3, 4, 5, padding=2, dtype=torch.float64),
    "group norm": lambda: nn.GroupNorm(1, 3, dtype=torch.float64),
}


def layers(nproc: int) -> dict[tuple[str, int], list[Tensor]]:
    """Each kind of layer alone, displaced from the third step on: the whole image's output in every step."""
    results = {}
    with Mesh(patch=nproc) as mesh:
        for name, order in itertools.product(LAYERS, (0, 1, FRESH)):
            torch.manual_seed(3)
            layer, images = LAYERS[name](), [torch.randn(2, 3, 11, 5, dtype=torch.float64) for _ in range(5)]
            axis, clock, hooks = mesh.axis("patch"), StepClock(), HookSet()
            clock.driven = True
            clock.begin([10.0, 9.0, 7.0, 6.0, 5.5])
            borders = DisplacedBorders(axis, clock, 2, min(order, 1), fresh_norms=order == FRESH)
            split = RowSplit(layer, axis, borders, (), lambda name: False)
            split.attach(hooks)
            for image in images:
                split.begin(RowLevels((11,), nproc), 0, 2)
                clock.enter(None)
                own = layer(image[:, :, split.own])
                whole = gather_tokens(axis, own.detach(), split.levels.sizes(0), 2)
                results.setdefault((name, order), []).append(whole.clone())
                clock.advance()
            hooks.remove()
            borders.reset()
    return results


def fresh_bytes(nproc: int) -> list[tuple[int, int]]:
    """Bytes sent and predicted in a generation with displaced rows and norms that are waited for, on every rank."""
    model = UNETS["SD"].model(torch.float64)
    calls = UNETS["SD"].calls((16, 16), torch.float64, (900.0, 800.0, 700.0, 600.0))
    with torch.no_grad(), parallelize(model, DisplacedPatch(norms="fresh")) as plan, Ledger(flops=False) as ledger:
        for call in calls:
            model(**call)
        told = plan.explain().bytes_total()[plan.mesh.rank]
        return gathered((int(ledger.summary()["bytes_sent"]), told))


def refusals(nproc: int) -> dict[str, str]:
    """What is refused, and how."""
    unet, named = UNETS["SD"].model(torch.float64), UNETS["SD"].calls((16, 16), torch.float64, (5.0,))[0]
    free, odd = UNETS["SD"].model(torch.float64), UNETS["SD"].model(torch.float64)
    for block in free.up_blocks:
        block.s1, block.s2, block.b1, block.b2 = 0.9, 0.2, 1.2, 1.4
    odd.mid_block.attentions.append(nn.MultiheadAttention(4, 1))
    mask = torch.ones(2, 256, dtype=torch.float64)
    masked = named | {"cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 16, 16)]}}
    residual = named | {"mid_block_additional_residual": torch.ones(2, 16, 5, 5, dtype=torch.float64)}
    joined = UNETS["IF"].model(torch.float64)
    pairs = UNETS["IF"].calls((16, 16), torch.float64, (5.0,))[0]
    dora = UNETS["SD"].build()
    dora.add_adapter(LoraConfig(r=2, use_dora=True, target_modules=["conv1"]))
    trials = {
        "rows": lambda: unet(**named | {"sample": named["sample"][:, :, :4]}),
        "mask": lambda: unet(**named | {"attention_mask": mask}),
        "masks of an IP-Adapter": lambda: unet(**masked),
        "residual": lambda: unet(**residual | {"down_block_additional_residuals": ()}),
        "dora": lambda: parallelize(dora, SyncPatch()),
        "freeu": lambda: parallelize(free, SyncPatch()),
        "unknown": lambda: parallelize(odd, SyncPatch()),
    }
    trials |= {
        "pairs of rows": lambda: joined(**pairs | {"sample": pairs["sample"][:, :, :14]}),
        "no text": lambda: joined(**pairs | {"encoder_hidden_states": None, "encoder_attention_mask": None}),
    }
    results = {}
    with torch.no_grad(), parallelize(unet, SyncPatch()), parallelize(joined, SyncPatch()):
        for name, trial in trials.items():
            try:
                trial()
                results[name] = "nothing was refused"
            except Exception as problem:  # noqa: BLE001 - the test reads which one it was
                results[name] = f"{type(problem).__name__}: {problem}"
    return results


@staying_connected
def scaled_down(nproc: int) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
    """Bytes of one step in the middle of a generation: predicted without ranks, and counted with them."""
    results = {}
    for name in ("SD", "SDXL"):
        model, calls = UNETS[name].model(torch.float32), UNETS[name].calls((16, 16), torch.float32, (9.0, 8, 7, 6))
        for strategy in (SyncPatch(), DisplacedPatch(), PartialPatch())[: 3 if name == "SD" else 1]:
            with torch.no_grad(), parallelize(model, strategy) as plan:
                for call in calls[:3]:
                    model(**call)
                with Ledger(flops=False) as ledger:
                    model(**calls[3])
                counted = agree(plan.mesh.axis("patch"), [ledger.summary()["bytes_sent"]])
            if plan.mesh.rank == 0:
                told = predict(model, strategy, ranks=nproc, **calls[0]).bytes_per_step
                results[name, type(strategy).__name__] = told, [int(row[0]) for row in counted]
    return results
