"""Runs on every rank: videos cut into clips, against attention written out from its definition on one rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor

from partsong import CfgParallel, ClipParallel, DataParallel, ParallelVae, PatchPipeline, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize, predict
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks.collectives import agree
from tests.parallel.clip_models import GRID, LONGEST, MAIN, VIDEOS, attention_by_definition
from tests.parallel.clip_pipelines import PIPES
from tests.parallel.ranks import error, gathered, staying_connected

#: What a case is made of: number of ranks, strategies, model and type.
Case = tuple[int, str, str, str]
#: Of pipelines: number of ranks, pipeline and setting.
PipeCase = tuple[int, str, str]
FOLDED = ("AnimateDiff + ControlNet", "AnimateDiff", "UNet3D", "UNet3D + ControlNet")
DTYPES = {"float64": torch.float64, "float32": torch.float32}
EXACT: dict[str, ClipParallel] = {
    "everything": ClipParallel(window=None),
    "every frame sampled": ClipParallel(window=1, stride=1),
}
WINDOWS: dict[str, ClipParallel] = {
    "window 1, stride 3": ClipParallel(window=1, stride=3),
    "window 3, stride 2": ClipParallel(window=3, stride=2),
    "window 2 alone": ClipParallel(window=2, stride=None),
    "emphasis": ClipParallel(window=1, stride=3, local_emphasis=2.0, global_emphasis=1.5),
}
KNOBS = EXACT | WINDOWS
#: Frames of each call under one plan, and its timestep: uneven clips, then one frame a rank, in the next generation.
CALLS = ((7, 500.0), (4, 900.0))


@functools.cache
def model_of(name: str, dtype: str) -> Any:
    return VIDEOS[name].model(DTYPES[dtype])


def calls_of(name: str, dtype: str) -> list[dict[str, Any]]:
    return [VIDEOS[name].call(frames, time, dtype=DTYPES[dtype]) for frames, time in CALLS]


@functools.cache
def defined(label: str, name: str, dtype: str) -> list[Tensor]:
    """What the calls give with the attention of the definition, on one rank and without hooks."""
    model, want = model_of(name, dtype), []
    for call, (frames, time) in zip(calls_of(name, dtype), CALLS, strict=True):
        with attention_by_definition(VIDEOS[name], frames, knobs_of(label), time), torch.no_grad():
            want.append(sample_of(model(**call)))
    return want


@functools.cache
def serial(name: str, dtype: str) -> list[Tensor]:
    """What the model gives."""
    with torch.no_grad():
        return [sample_of(model_of(name, dtype)(**call)) for call in calls_of(name, dtype)]


def product(nproc: int) -> list[Case]:
    """All settings on the main models, two on every model; other axes alone where frames are folded, and beside clips.

    All of them are on this number of ranks.
    """
    some = {"everything": KNOBS["everything"], "window 1, stride 3": KNOBS["window 1, stride 3"]}
    found = [(label, name) for name in VIDEOS for label in (KNOBS if name in MAIN else some)]
    if nproc == 2:
        found += itertools.product(("CfgParallel", "DataParallel"), FOLDED)
    if nproc == 4:
        found += itertools.product(("CfgParallel x clips", "DataParallel x clips"), (FOLDED[0], "Mochi"))
    return [(nproc, label, name, dtype) for label, name in found for dtype in DTYPES]


def knobs_of(label: str) -> ClipParallel:
    """The knobs that a case is measured by."""
    clips = label.partition(" x ")[2]
    return KNOBS.get(label) or KNOBS["window 1, stride 3" if clips else "everything"]


def _strategies(label: str) -> tuple[Strategy, ...]:
    guided: dict[str, Strategy] = {"CfgParallel": CfgParallel(degree=2), "DataParallel": DataParallel(degree=2)}
    kind, _, clips = label.partition(" x ")
    if kind not in guided:
        return (KNOBS[label],)
    return (guided[kind], knobs_of(label)) if clips else (guided[kind],)


@staying_connected
def matrix(nproc: int, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """All these cases, which are on the ranks of this process."""
    logging.set_verbosity_error()
    axes: dict[str, list[Case]] = {}
    for case in cases:
        axes.setdefault("" if case[1] in KNOBS else case[1], []).append(case)
    results = {}
    for some in axes.values():
        with Mesh(**mesh_for(_strategies(some[0][1]), nproc)) as mesh, torch.no_grad():
            results |= {case: _case(*case[1:], mesh) for case in some}
    return results


def _case(label: str, name: str, dtype: str, mesh: Mesh) -> dict[str, Any]:
    """What rank 0 computed, whether the others have the same, and what is left of the plan after it."""
    model, calls, got, counted, told = model_of(name, dtype), calls_of(name, dtype), [], [], []
    before = serial(name, dtype)[0] if label == "everything" else None
    with parallelize(model, *_strategies(label), mesh=mesh) as plan:
        for call in calls:
            with Ledger(flops=False) as ledger:
                got.append(sample_of(model(**call)))
            counted.append(ledger.summary()["bytes_sent"])
            told.append(plan.explain().bytes_by_step[-1][mesh.rank])
    sums = [(sample * sample.flatten().cos().view_as(sample)).sum().item() for sample in got]
    clean = is_clean(model) and (before is None or torch.equal(sample_of(model(**calls[0])), before))
    table = agree(mesh.axis(*mesh.degrees), [*sums, float(counted == told), float(clean), sum(counted)])
    return {
        "got": got,
        "same": all(row[: len(sums)] == table[0][: len(sums)] for row in table),
        "told": all(row[-3] == 1.0 for row in table),
        "clean": all(row[-2] == 1.0 for row in table),
        "sent": [int(row[-1]) for row in table],
    }


def is_clean(module: Any) -> bool:
    """Whether no hook is left."""
    return not any({"forward", "_diffusers_hook"} & vars(child).keys() for child in module.modules())


@staying_connected
def pipelines(nproc: int, cases: list[PipeCase]) -> dict[PipeCase, list[Any]]:
    """Real pipelines, exact and with windows: each rank's distance to one rank, and what is left.

    On 2 ranks the exact ones share the decoding too, on 4 all share the branches of guidance.
    """
    logging.set_verbosity_error()
    results = {}
    for case in cases:
        _, name, label = case
        pipe_of, knobs = PIPES[name], KNOBS[label]
        pipe = pipe_of.make()
        want = pipe_of.call(pipe)
        with attention_by_definition(VIDEOS[name], pipe_of.frames, knobs, 0.0):
            windowed = pipe_of.call(pipe)
        alone: tuple[Strategy, ...] = (ParallelVae(),) if label in EXACT else ()
        others = (CfgParallel(degree=2),) if nproc == 4 else alone
        with parallelize(pipe, knobs, *others) as plan, Ledger(flops=False) as ledger:
            got = pipe_of.call(pipe)
            told = plan.explain().bytes_total()[plan.mesh.rank] == ledger.summary()["bytes_sent"]
            rows = gathered((error(got, windowed), error(got, want), told))
        results[case] = [(*row, is_clean(pipe_of.denoiser(pipe))) for row in rows]
    return results


def refusals(nproc: int) -> dict[str, str]:
    """What is refused, and how: whole plans, and calls under one."""
    return _refused_plans() | _refused_calls()


def _refused_plans() -> dict[str, str]:
    noisy, odd = PIPES["AnimateDiff"].make(), VIDEOS["AnimateDiff"].model()
    wan, joint = VIDEOS["Wan"].model(), VIDEOS["CogVideoX"].model()
    noisy.enable_free_noise(context_length=4, context_stride=2)
    odd.mid_block.attentions.append(torch.nn.MultiheadAttention(4, 1))
    trials: dict[str, tuple[Any, ...]] = {
        "free noise": (noisy, ClipParallel()),
        "unknown": (odd, ClipParallel()),
        "layers of folded frames": (odd, PatchPipeline()),
        "tokens of clips": (wan, ClipParallel(degree=1), Ulysses()),
        "emphasis beside text": (joint, ClipParallel(local_emphasis=10.0)),
    }
    return {name: _said(lambda trial=trial: parallelize(*trial)) for name, trial in trials.items()}


def _refused_calls() -> dict[str, str]:
    motion, wan = VIDEOS["AnimateDiff"], VIDEOS["Wan"]
    pipe, transformer = PIPES["AnimateDiff"].make(), wan.model()
    packed, causal = VIDEOS["LTX-Video"].model(), VIDEOS["SkyReels-V2"].model()
    causal.register_to_config(num_frame_per_block=2)
    call, tokens, forced = motion.call(4), VIDEOS["LTX-Video"].call(4), wan.call(4)
    trials: dict[str, Callable[[], Any]] = {
        "too few frames": lambda: pipe.unet(**motion.call(1)),
        "too many frames": lambda: pipe.unet(**motion.call(LONGEST + 1)),
        "text of samples": lambda: pipe.unet(**call | {"encoder_hidden_states": call["encoder_hidden_states"][:2]}),
        "mask": lambda: pipe.unet(**call | {"attention_mask": torch.ones(2, 48)}),
        "too few frames of tokens": lambda: transformer(**wan.call(1)),
        "frames not told": lambda: packed(**tokens | {"num_frames": None, "video_coords": torch.ones(2, 3, 36)}),
        "tokens of no frame": lambda: packed(**tokens | {"height": GRID - 1}),
        "causal frames": lambda: causal(**forced),
    }
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for module in (pipe.unet, transformer, packed, causal):
            stack.enter_context(parallelize(module, ClipParallel()))
        told = {name: _said(trial) for name, trial in trials.items()}
        pipe.enable_free_noise(context_length=4, context_stride=2)
        return told | {"free noise later": _said(lambda: pipe.unet(**call))}


def _said(trial: Callable[[], Any]) -> str:
    try:
        trial()
    except Exception as problem:  # noqa: BLE001 - the test reads which one it was
        return f"{type(problem).__name__}: {problem}"
    return "nothing was refused"


@staying_connected
def interrupted(nproc: int) -> list[tuple[str, bool, bool]]:
    """A call that fails in the middle on every rank: nothing is left behind, and the plan works again."""
    rows = []
    for name in MAIN:
        model, calls = model_of(name, "float64"), calls_of(name, "float64")
        middle = [child for child in model.modules() if type(child).__name__ == "FeedForward"][1]
        with torch.no_grad(), parallelize(model, ClipParallel(window=None)):
            stop = middle.register_forward_pre_hook(_fail)
            said = _said(lambda model=model, calls=calls: model(**calls[0]))
            stop.remove()
            works = error(sample_of(model(**calls[0])), serial(name, "float64")[0]) < 1e-10
        rows.append((said, works, is_clean(model)))
    return rows


def _fail(*_: Any) -> None:
    raise RuntimeError("stopped")


@staying_connected
def scaled_down(nproc: int) -> dict[str, tuple[list[int], list[int]]]:
    """Bytes of one step in the middle of a generation: predicted without ranks, and counted with them."""
    results, knobs = {}, ClipParallel(window=1, stride=3)
    for name in ("UNet3D", "CogVideoX"):
        video = VIDEOS[name]
        model, calls = video.model(torch.float32), [video.call(7, time, dtype=torch.float32) for time in (9, 8, 7, 6)]
        told = predict(model, knobs, ranks=nproc, **calls[0]).bytes_per_step
        with torch.no_grad(), parallelize(model, knobs) as plan:
            for call in calls[:3]:
                model(**call)
            with Ledger(flops=False) as ledger:
                model(**calls[3])
            counted = agree(plan.mesh.axis("clip"), [ledger.summary()["bytes_sent"]])
        results[name] = told, [int(row[0]) for row in counted]
    return results
