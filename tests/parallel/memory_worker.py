"""Runs on every rank: bytes of tensors that are really alive during calls under a plan, and what was predicted."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partsong.parallel import Mesh, mesh_for, parallelize, predict_memory
from partsong.samplers import registry
from tests.parallel.ranks import gathered, staying_connected
from tests.parallel.unets import UNETS

CALLS = 4


def flux() -> tuple[Any, dict[str, Any]]:
    """A small model, and a call whose tensors take as much memory as its weights."""
    from diffusers import FluxTransformer2DModel

    tokens, text, width = 512, 32, 128
    torch.manual_seed(0)
    model: Any = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=width,
        pooled_projection_dim=width,
        axes_dims_rope=(8, 12, 12),
    )
    named = {
        "hidden_states": torch.randn(2, tokens, 16),
        "encoder_hidden_states": torch.randn(2, text, width),
        "pooled_projections": torch.randn(2, width),
        "timestep": torch.full((2,), 0.5),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(16.0), torch.arange(tokens / 16)),
        "txt_ids": torch.zeros(text, 3),
    }
    return model.eval(), named


def unet() -> tuple[Any, dict[str, Any]]:
    """A small UNet."""
    return UNETS["SD"].model(torch.float32), UNETS["SD"].calls((48, 48), torch.float32, (900.0,))[0]


MODELS = {"Flux": flux, "UNet": unet}


class Alive(TorchDispatchMode):
    """Looks after every operator at the sizes of all storages that operators made."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.seen: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage)
        alive = {key: held for key, watch in self.seen.items() if (held := watch()) is not None}
        self.seen = {key: weakref.ref(held) for key, held in alive.items()}
        self.most = max(self.most, sum(held.nbytes() for held in alive.values() if held.data_ptr() not in self.known))
        return output


@staying_connected
def memory(nproc: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Bytes on each rank, counted and predicted, for each model and the strategies beside its name."""
    results = {}
    for name, text in cases:
        strategies = [registry.parse_strategy(part) for part in text.split()]
        model, named = MODELS[name]()
        with Mesh(**mesh_for(strategies, nproc)) as mesh, torch.no_grad():
            with parallelize(model, *strategies, mesh=mesh) as plan:
                plan.clock.driven = True
                plan.clock.begin(list(range(2 * CALLS, 0, -1)))
                own = [getattr(weight, "to_local", lambda weight=weight: weight)() for weight in model.parameters()]
                given = [leaf for leaf in tree_leaves(named) if isinstance(leaf, Tensor)]
                with Alive([*own, *model.buffers(), *given]) as alive:
                    for _ in range(CALLS):
                        model(**named)
                        plan.clock.advance()
                counted = sum(weight.nbytes for weight in own) + alive.most
            told = predict_memory(model, *strategies, ranks=nproc, rank=mesh.rank, **named)
            results[name, text] = gathered((counted, told.weights + told.working))
    return results
