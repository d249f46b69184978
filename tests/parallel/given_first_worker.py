"""Runs on every rank: a model that draws a picture behind words and pictures which every rank holds."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21FlexAttnProcessor, QwenImage21KVCache

from partsong import DisplacedPatch, LayerPipeline, PatchPipeline, Ring, TokenRing, Ulysses, Usp
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.ranks import error, gathered, on_first, refusal, staying_connected
from tests.tiny_models.weights import noise, randomized

STRATEGIES: dict[str, Strategy] = {
    "Ulysses": Ulysses(),
    "Ring": Ring(),
    "TokenRing": TokenRing(),
    "Usp": Usp(ulysses_degree=2, ring_degree=2),
    # In its first steps it waits for what is new.
    "DisplacedPatch": DisplacedPatch(warmup_steps=3),
}
REFUSED: dict[str, Strategy] = {"PatchPipeline": PatchPipeline(), "LayerPipeline": LayerPipeline()}
#: A picture that is given, of 2 x 4 tokens behind three words, then two words, and one of 4 x 6 that is drawn. Four
#: tokens have one place in the mask.
SHAPES = [[(1, 2, 4), (1, 4, 6)]] * 2
GIVEN = [False] * 3 + [True] * 2 + [False] * 2
LENGTHS = {"given": 8, "drawn": 24, "words": 7}


def model_of(**config: Any) -> QwenImage21Transformer2DModel:
    small: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 3,
    }
    return randomized(
        QwenImage21Transformer2DModel(**small | config, context_in_dim=12, axes_dims_rope=(2, 2, 4))
    ).double()


@torch.no_grad()
def steps(model: Any, *, keeps_keys: bool) -> list[torch.Tensor]:
    """Three calls at different times; with a cache only the first one computes what is given."""
    cache = QwenImage21KVCache(2) if keeps_keys else None
    made = []
    for number in range(3):
        mode = {"kv_cache": cache, "kv_cache_mode": "cached" if number else "extract"} if keeps_keys else {}
        latents = torch.cat(
            [noise(2, LENGTHS["given"], 4, seed=1), noise(2, LENGTHS["drawn"], 4, seed=2 + number)], dim=1
        )
        said = torch.ones(2, LENGTHS["words"], dtype=torch.bool)
        said[1, -1] = False  # the second sample has a word less
        output = model(
            hidden_states=latents,
            encoder_hidden_states=noise(2, LENGTHS["words"], 12, seed=9),
            encoder_hidden_states_mask=said,
            timestep=torch.full((2,), 0.9 - 0.3 * number, dtype=torch.float64),
            img_shapes=SHAPES,
            img_mask=torch.tensor([GIVEN + [True] * 6] * 2),
            return_dict=False,
            **mode,
        )[0]
        made.append(output[:, -LENGTHS["drawn"] :])
    return made


def _serial() -> dict[str, list[torch.Tensor]]:
    return {
        "keys kept": steps(model_of(), keeps_keys=True),
        "all anew": steps(model_of(), keeps_keys=False),
        "one time": steps(model_of(causal_condition=False), keeps_keys=False),
    }


@staying_connected
def compared(nproc: int, names: list[str]) -> dict[str, Any]:
    """The picture's outputs over ranks against those of one process, and bytes of the last call."""
    serial, found = on_first(_serial), {}
    for name in names:
        for kind, wanted in serial.items():
            model = model_of(causal_condition=kind != "one time")
            with (
                Mesh(**mesh_for((STRATEGIES[name],), nproc)) as mesh,
                parallelize(model, STRATEGIES[name], mesh=mesh) as plan,
                Ledger(flops=False) as ledger,
            ):
                got = steps(model, keeps_keys=kind == "keys kept")
                predicted = plan.explain().bytes_total()[mesh.rank]
            errors = max(error(one, other) for one, other in zip(got, wanted, strict=True))
            sent = int(ledger.summary()["bytes_sent"])
            found[name, kind] = gathered({"error": errors, "sent": sent, "predicted": predicted})
    return found


@staying_connected
def refusals() -> dict[str, list[str]]:
    """What strategies that send parts of samples through the blocks say, and what another processor is told."""
    found = {}
    for name, strategy in (REFUSED | {"flex": Ulysses()}).items():
        model = model_of()
        if name == "flex":
            set_processor: Any = model.set_attn_processor
            set_processor(QwenImage21FlexAttnProcessor())

        def act(model: Any = model, strategy: Strategy = strategy) -> None:
            with Mesh(**mesh_for((strategy,), 2)) as mesh, parallelize(model, strategy, mesh=mesh):
                steps(model, keeps_keys=True)

        found[name] = gathered(refusal(act))
    return found
