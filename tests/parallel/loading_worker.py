"""Runs on every rank: pipelines of which each rank loads only its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging

from partsong import EncodeOnce, Mesh, generate, load_pipeline, mesh_for, zoo
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Strategy, parallelize
from partsong.parallel.ranks.trees import broadcast_tree
from partsong.samplers.registry import parse_strategy
from partsong.seeds import generators
from tests.parallel.ranks import error, gathered, staying_connected
from tests.parallel.tensor_worker import _held

CALL = {"prompt": "a red circle left of a blue square", "num_inference_steps": 2, "output_type": "pt"}
MIXES = (
    "tensor-parallel",
    "sharded-weights ulysses",
    "encode-once cfg-parallel",
    "encode-once sharded-weights cfg-parallel",
    "encode-once time-parallel",
)


def _strategies(mix: str) -> list[Strategy]:
    return [parse_strategy(part) for part in mix.split()]


@staying_connected
def mixes(nproc: int, names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """The trained model under some mixes, on each rank."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    whole = zoo.load("shapes")
    whole.set_progress_bar_config(disable=True)
    want = whole(**CALL, generator=generators(0, 1)).images
    total = sum(weight.numel() for weight in whole.transformer.parameters())
    results = {}
    for mix in names:
        strategies = _strategies(mix)
        with Mesh(**mesh_for(strategies, nproc)) as mesh:
            with load_pipeline("shapes", *strategies, mesh=mesh) as plan, Ledger(flops=False) as ledger:
                pipe = plan.target
                pipe.set_progress_bar_config(disable=True)
                held = sum(_held(weight).numel() for weight in pipe.transformer.parameters()) / total
                got = generate(plan, **CALL, generator=generators(0, 1)).images
                predicted = plan.explain().bytes_total()[mesh.rank]
                said = str(plan.explain())
            state = pipe.transformer.state_dict()
            same = all(torch.equal(state[name], tensor) for name, tensor in whole.transformer.state_dict().items())
            row = {"error": error(got, want), "held": held, "same": same, "encodes": pipe.text_encoder is not None}
            row |= {"predicted": predicted, "counted": ledger.summary()["bytes_sent"], "said": said}
            results[mix] = gathered(row)
    return results


def kept_types(nproc: int, folder: Path) -> list[dict[str, Any]]:
    """Types of a model's weights, read whole by diffusers and in shares."""
    from diffusers import WanTransformer3DModel

    logging.set_verbosity_error()
    whole: Any = WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    with Mesh(tensor=nproc) as mesh:
        with load_pipeline(folder, *_strategies("tensor-parallel"), mesh=mesh, dtype="bfloat16") as plan:
            types = {name: weight.dtype for name, weight in plan.target.transformer.named_parameters()}
        want = {name: weight.dtype for name, weight in whole.named_parameters()}
        state = plan.target.transformer.state_dict()
        same = all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())
        return gathered({"types": types == want, "kinds": len(set(want.values())), "same": same})


def refused(nproc: int, folder: Path) -> list[str]:
    """What every rank says of a folder whose weights have another shape than its configuration."""
    logging.set_verbosity_error()
    with Mesh(tensor=nproc) as mesh:
        try:
            load_pipeline(folder, *_strategies("tensor-parallel"), mesh=mesh)
        except PartsongError as problem:
            return gathered(str(problem))
    return gathered("loaded")


def unknown_leaves(nproc: int) -> list[str]:
    """What every rank says where the first one has something that cannot be sent."""
    with Mesh(data=nproc) as mesh:
        try:
            broadcast_tree(mesh.axis("data"), [torch.ones(2), object()], mesh.device, name="parts")
        except PartsongError as problem:
            return gathered(str(problem))
    return gathered("sent")


def failing_prompts(nproc: int) -> list[tuple[str, float]]:
    """What every rank says of a prompt that cannot be encoded, and how the next one goes."""
    logging.set_verbosity_error()
    pipe = zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    want = pipe(**CALL, generator=generators(0, 1)).images
    encoder, said = pipe.text_encoder.forward, ""
    with Mesh(cfg=nproc) as mesh, parallelize(pipe, EncodeOnce(), *_strategies("cfg-parallel"), mesh=mesh) as plan:

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the encoder is broken")

        pipe.text_encoder.forward = broken
        try:
            generate(plan, **CALL, generator=generators(0, 1))
        except (RuntimeError, PartsongError) as problem:
            said = str(problem)
        pipe.text_encoder.forward = encoder
        got = generate(plan, **CALL, generator=generators(0, 1)).images
        return gathered((said, error(got, want)))


def pasted(code: str) -> list[tuple[int, int]]:
    """Sizes of the pictures that lines of Python make, which somebody pastes into a program."""
    names: dict[str, Any] = {}
    exec(code, names)
    return [image.size for image in names["images"].images]
