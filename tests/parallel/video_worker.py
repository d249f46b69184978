"""Runs on every rank: video pipelines against serial ones, and calls of video models that are cut in unusual ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor

from partsong import CfgParallel, DataParallel, DisplacedPatch, DynamicSequence, PartialPatch, Ring, TokenRing, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import STEPS, Pipe
from tests.parallel.ranks import error, gathered, staying_connected
from tests.parallel.video_pipelines import VIDEO_PIPES
from tests.tiny_models.weights import randomized

STRATEGIES: dict[str, Strategy] = {
    "Ulysses": Ulysses(),
    "CfgParallel": CfgParallel(),
    "DisplacedPatch": DisplacedPatch(warmup_steps=99),
    "DynamicSequence": DynamicSequence(),
}


#: The pipelines that some strategies are tried on; the others run on all.
FEW = {
    "DynamicSequence": ["Latte"],
    "DisplacedPatch": ["LTX-Video", "CogVideoX rotary, DPM", "SkyReels-V2 forcing, frames apart"],
}


def names(label: str) -> list[str]:
    """The pipelines that a strategy runs on."""
    return FEW.get(label, list(VIDEO_PIPES))


@staying_connected
def pipelines(cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Pipelines under a strategy: error, bytes and steps on each rank."""
    logging.set_verbosity_error()
    results = {}
    for label, strategy in STRATEGIES.items():
        with Mesh(**mesh_for((strategy,), 2)) as mesh:
            for name in (name for other, name in cases if other == label):
                results[label, name] = gathered(_pipeline(VIDEO_PIPES[name], strategy, mesh))
    return results


def _pipeline(pipe_of: Pipe, strategy: Strategy, mesh: Mesh) -> dict[str, Any]:
    pipe = pipe_of.make()
    want = pipe_of.call(pipe)
    with parallelize(pipe, strategy, mesh=mesh) as plan, Ledger(flops=False) as ledger:
        got = pipe_of.call(pipe)
        predicted = plan.explain().bytes_total()[mesh.rank]
    return {
        "error": error(got, want),
        "sent": int(ledger.summary()["bytes_sent"]),
        "predicted": predicted,
        "forwards": int(ledger.summary()["forwards"]),
        "steps": sum("note" not in record for record in ledger.records),
        "restored": torch.equal(pipe_of.call(pipe), want),
    }


# --- DynamicSequence on sizes of all kinds ----------------------------------------------------------------------------

#: Frames, height and width in latents, samples, temporal attention or none.
SHAPES = {
    "as many of each": (4, 4, 4, 2, True),
    "odd frames and tokens": (5, 6, 10, 2, True),
    "fewer frames than ranks": (2, 6, 6, 1, True),
    "one frame": (1, 6, 6, 2, True),
    "no temporal attention": (3, 6, 6, 2, False),
    "as many tokens as ranks": (7, 4, 4, 1, True),
}


def latte(frames: int) -> Any:
    model = FAMILIES["Latte"].build(6)
    model = type(model)(**{**model.config, "video_length": frames, "num_layers": 3})
    return randomized(model)


def latte_call(shape: tuple[int, int, int, int, bool]) -> dict[str, Any]:
    frames, height, width, batch, is_temporal = shape
    torch.manual_seed(5)
    return {
        "hidden_states": torch.randn(batch, 4, frames, height, width).double(),
        "encoder_hidden_states": torch.randn(batch, 7, 12).double(),
        "timestep": torch.full((batch,), 500.0).double(),
        "enable_temporal_attentions": is_temporal,
    }


@staying_connected
def shapes(nproc: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Some shapes on each rank: error, bytes, and what is left behind."""
    results = {}
    compositions: dict[str, tuple[Strategy, ...]] = {"alone": (DynamicSequence(),)}
    if nproc == 4:
        compositions["with CfgParallel"] = (CfgParallel(), DynamicSequence())
        compositions["with DataParallel"] = (DataParallel(degree=2), DynamicSequence())
    for how, chosen in compositions.items():
        with Mesh(**mesh_for(chosen, nproc)) as mesh, torch.no_grad():
            for name in (name for other, name in cases if other == how):
                found = _shape(SHAPES[name], chosen, mesh)
                results[how, name] = gathered(found) if nproc > 1 else [found]
    return results


def _shape(shape: tuple[int, int, int, int, bool], chosen: tuple[Strategy, ...], mesh: Mesh) -> dict[str, Any]:
    model, named = latte(shape[0]), latte_call(shape)
    want = model(**named).sample
    with parallelize(model, *chosen, mesh=mesh) as plan, Ledger(flops=False) as ledger:
        got = [model(**named).sample for _ in range(2)]
        explained = plan.explain()
    return {
        "error": max(error(one, want) for one in got),
        "sent": int(ledger.summary()["bytes_sent"]),
        "predicted": explained.bytes_total()[mesh.rank],
        "told": str(explained),
        "clean": not any({"forward", "_diffusers_hook"} & vars(child).keys() for child in model.modules()),
    }


# --- single scenarios on two ranks ------------------------------------------------------------------------------------


def called(mesh: Mesh, family: str, strategy: Strategy, config: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """A model's call under a strategy: its distance from the serial one."""
    model, named = FAMILIES[family].model(6, torch.float64), FAMILIES[family].call(6, 1, torch.float64)
    if config:
        torch.manual_seed(11)
        model = type(model)(**{**model.config, **config}).double().eval()
    named |= more
    with torch.no_grad():
        want = sample_of(model(**named))
        with parallelize(model, strategy, mesh=mesh):
            return error(sample_of(model(**named)), want)


def four_frames() -> torch.Tensor:
    """Two blocks of two frames: one sees both, the other itself."""
    torch.manual_seed(6)
    first = FAMILIES["SkyReels-V2"].call(6, 1, torch.float64)["hidden_states"]
    return torch.randn(*first.shape[:2], 4, *first.shape[3:], dtype=torch.float64)


def after_warm_up(mesh: Mesh, family: str, strategy: Strategy) -> tuple[float, float]:
    """What a stale strategy changes after its warm-up, with inputs that stay (none is stale) and that change."""
    model = FAMILIES[family].model(6, torch.float64)
    named = FAMILIES[family].call(6, 2, torch.float64)
    found = []
    with torch.no_grad():
        for noise in (0.0, 0.3):
            with parallelize(model, strategy, mesh=mesh):
                for time in (900, 700, 500):
                    call = FAMILIES[family].at(named, time if noise else 700 - 1e-12 * (900 - time))
                    call["hidden_states"] = call["hidden_states"] * (1 + noise * time / 100)
                    got = sample_of(model(**call))
            found.append(error(got, sample_of(model(**call))))
    return found[0], found[1]


def holes() -> Tensor:
    return torch.tensor([[True, True, False, True, True, False, False]])


def nothing() -> Tensor:
    return torch.zeros(1, 7, dtype=torch.bool)


#: Every attention is asked how far it must see, and the answer is everything.
NEAR = PartialPatch(warmup_steps=1, order=0, portion="auto", error_budget=0.0)
AXIS = {
    "Mochi, near keys": "patch",
    "Mochi, old keys": "patch",
    "Latte, old keys": "patch",
    "causal frames, Ring": "ring",
    "causal frames, TokenRing": "ring",
    "causal frames, DisplacedPatch": "patch",
}
SCENARIOS: Mapping[str, Callable[[Mesh], Any]] = {
    "no such blocks": lambda mesh: called(mesh, "Wan", DynamicSequence()),
    "few tokens": lambda mesh: called(
        mesh, "Latte", DynamicSequence(), hidden_states=torch.randn(1, 4, 3, 2, 2).double()
    ),
    "text with holes": lambda mesh: called(mesh, "Mochi", Ulysses(), encoder_attention_mask=holes()),
    "no text": lambda mesh: called(mesh, "Mochi", Ulysses(), encoder_attention_mask=nothing()),
    **{
        f"causal frames, {type(strategy).__name__}": lambda mesh, chosen=strategy: called(
            mesh, "SkyReels-V2", chosen, {"num_frame_per_block": 2}, hidden_states=four_frames()
        )
        for strategy in (Ulysses(), Ring(), TokenRing(), DisplacedPatch(warmup_steps=1))
    },
    "Mochi, old keys": lambda mesh: after_warm_up(mesh, "Mochi", DisplacedPatch(warmup_steps=1, order=0)),
    "Mochi, near keys": lambda mesh: after_warm_up(mesh, "Mochi", NEAR),
    "Latte, old keys": lambda mesh: after_warm_up(mesh, "Latte", DisplacedPatch(warmup_steps=1, order=0)),
}


@staying_connected
def scenarios() -> dict[str, list[Any]]:
    """Every scenario: what each rank got, or the error it was given."""
    logging.set_verbosity_error()
    results = {}
    for name, scenario in SCENARIOS.items():
        with Mesh(timeout=20.0, **{AXIS.get(name, "ulysses"): 2}) as mesh:
            try:
                value = scenario(mesh)
            except Exception as problem:  # noqa: BLE001 - the test reads which one it was
                value = f"{type(problem).__name__}: {problem}"
            results[name] = gathered(value)
    return results


def steps_of(name: str) -> int:
    """Steps of the sampler: frames that begin one after another need more."""
    return STEPS + 2 if name.endswith("apart") else STEPS
