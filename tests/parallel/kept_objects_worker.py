"""Runs on every rank: what users do to a model or a pipeline under a plan besides calling it."""

from __future__ import annotations

import copy
import logging
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from partsong import Mesh, OffloadWeights, PartsongError, ShardedWeights, TensorParallel, Ulysses, generate, parallelize
from partsong.parallel import Strategy, mesh_for
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.ranks import error, gathered, refusal, staying_connected
from tests.parallel.tensor_worker import build, calls
from tests.pipelines.cases import CASES

PLANS: dict[str, tuple[Strategy, ...]] = {
    "TensorParallel": (TensorParallel(),),
    "ShardedWeights": (ShardedWeights(),),
    "OffloadWeights": (OffloadWeights(resident=0.2), Ulysses()),
    "Ulysses": (Ulysses(),),
}


def _load(model: Any) -> None:
    names = build("SD3").state_dict()
    model.load_state_dict({name: torch.zeros_like(weight) for name, weight in names.items()})


ACTS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a layer": lambda model: copy.deepcopy(model.transformer_blocks[0]),
    "pickle": pickle.dumps,
    "load_state_dict": _load,
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a layer": lambda model: model.transformer_blocks[0].state_dict(),
    "state_dict of a part": lambda model: model.transformer_blocks[0].attn.state_dict(prefix="attn."),
    "save_pretrained": lambda model: _saved(model),
}


def _saved(model: Any) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/diffusion_pytorch_model.safetensors")


@staying_connected
def acts(nproc: int) -> dict[str, list[dict[str, Any]]]:
    """What comes of each act under each plan, and how far answers are off: after all of them, cast, and undone."""
    results = {}
    for name, strategies in PLANS.items():
        with Mesh(**mesh_for(strategies, nproc)) as mesh, torch.no_grad():
            results[name] = gathered(_outcome(name, strategies, mesh))
    return results


def _outcome(name: str, strategies: tuple[Strategy, ...], mesh: Mesh) -> dict[str, Any]:
    model, named = build("SD3"), calls("SD3")[0]
    want = sample_of(model(**named))
    whole = {key: weight.clone() for key, weight in model.state_dict().items()}
    found: dict[str, Any] = {}
    with parallelize(model, *strategies, mesh=mesh):
        _answer(model, named)
        for act in ACTS if name != "Ulysses" else ACTS.keys() - {"load_state_dict"}:
            try:
                given = ACTS[act](model)
                found[act] = "as it was" if isinstance(given, dict) and _is_of(given, whole) else "something else"
            except PartsongError as problem:
                found[act] = str(problem)
        found["under"] = error(_answer(model, named), want)
        model.float()
        found["cast"] = error(_answer(model, named), want)
    return {**found, "undone": error(_answer(model, named), want)}


def _answer(model: Any, named: dict[str, Any]) -> Tensor:
    kind = next(model.parameters()).dtype
    cast = {key: value.to(kind) if isinstance(value, Tensor) else value for key, value in named.items()}
    return sample_of(model(**cast)).double()


def _is_of(given: dict[str, Tensor], whole: dict[str, Tensor]) -> bool:
    """Whether weights are those of a whole model, or of its first block."""
    first = {name.removeprefix("transformer_blocks.0."): weight for name, weight in whole.items()}
    of = whole if given.keys() == whole.keys() else {name: first[name] for name in given}
    return all(torch.equal(weight.double(), of[name].double()) for name, weight in given.items())


def own_hooks(nproc: int) -> list[list[str]]:
    """What is said of a forward hook on a layer, in two calls."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    with Mesh(ulysses=nproc) as mesh, torch.no_grad():
        model, named = build("SD3"), calls("SD3")
        logging.getLogger("partsong").addHandler(handler)
        with parallelize(model, Ulysses(), mesh=mesh):
            model.register_forward_hook(lambda *_: None)  # it sees the whole call
            model(**named[0])
            none = len(said)
            model.transformer_blocks[1].register_forward_hook(keep_tokens)
            for call in (*named, named[0]):
                model(**call)
        return gathered([str(none), *said])


def keep_tokens(*_: Any) -> None:
    """Stands for a hook of a user."""


def replaced(nproc: int) -> list[dict[str, str]]:
    """What is said of a pipeline with another transformer, and of a plan after `undo`."""
    with Mesh(ulysses=nproc) as mesh:
        case = CASES["StableDiffusion3Pipeline"]
        pipe, said = case.make(), {}
        plan = parallelize(pipe, Ulysses(), mesh=mesh)
        mine, pipe.transformer = pipe.transformer, case.make().transformer
        said["replaced"] = refusal(lambda: case.run(pipe))
        pipe.transformer = mine
        said["back"] = refusal(lambda: case.run(pipe))
        said["deepcopy"] = refusal(lambda: copy.deepcopy(pipe))
        plan.undo()
        said["entered"] = refusal(plan.__enter__)
        said["generate"] = refusal(lambda: generate(plan, prompt=""))
        said["copied"] = refusal(lambda: copy.deepcopy(pipe))
        return gathered(said)
