"""Runs on every rank: models whose text, or whose picture, has fewer tokens than layers or ranks expect."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AllegroTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro
from diffusers.utils import logging
from torch import Tensor

from partsong import Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.equivalence_worker import strategies
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error, gathered, staying_connected
from tests.tiny_models.weights import randomized

#: Tokens of the texts of the families.
TEXT = 7


def shortened(value: Any, length: int) -> Any:
    """An argument with only the first tokens of its texts, wherever a dimension counts those."""
    if isinstance(value, dict):
        return {name: shortened(item, length) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(shortened(item, length) for item in value)
    if isinstance(value, Tensor) and TEXT in value.shape:
        return value.narrow(value.shape.index(TEXT), 0, length)
    return value


@staying_connected
def short_texts(nproc: int, cases: list[tuple[str, str, int]]) -> dict[tuple[str, str, int], list[tuple[float, bool]]]:
    """How far each model is from itself alone, and whether the bytes are the predicted ones, on every rank."""
    logging.set_verbosity_error()
    results = {}
    for case in cases:
        name, label, length = case
        model, named = FAMILIES[name].model(6, torch.float64), FAMILIES[name].call(6, 2, torch.float64)
        assert TEXT in named["encoder_hidden_states"].shape
        results[case] = gathered(_compared(model, shortened(named, length), *strategies(nproc)[label], ranks=nproc))
    return results


@staying_connected
def one_token(nproc: int) -> list[tuple[float, bool]]:
    """The same of Allegro, which drops a dimension of one token, with a token of a video on every rank."""
    model = randomized(
        AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            cross_attention_dim=24,
            caption_channels=24,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
        )
    )
    sizes = {"grid_size": (1, 1), "temporal_size": nproc, "interpolation_scale": (2.0, 1.0, 1.0)}
    *rope, frames, rows, columns = get_3d_rotary_pos_embed_allegro(12, crops_coords=((0, 0), (1, 1)), **sizes)
    grid = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).reshape(-1, 3).T.reshape(3, 1, -1)
    named = {
        "hidden_states": torch.randn(1, 4, nproc, 2, 2, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(1, 6, 24, dtype=torch.float64),
        "timestep": torch.tensor([5]),
        "attention_mask": torch.ones(1, nproc, 2, 2, dtype=torch.float64),
        "encoder_attention_mask": torch.ones(1, 6, dtype=torch.float64),
        "image_rotary_emb": (tuple(rope), tuple(grid)),
    }
    return gathered(_compared(model, named, Ulysses(), ranks=nproc))


def _compared(model: Any, named: dict[str, Any], *chosen: Strategy, ranks: int) -> tuple[float, bool]:
    with torch.no_grad(), Mesh(**mesh_for(chosen, ranks)) as mesh:
        want = sample_of(model(**named))
        with parallelize(model, *chosen, mesh=mesh) as plan, Ledger(flops=False) as ledger:
            got = sample_of(model(**named))
            predicted = plan.explain().bytes_total()[mesh.rank]
    return error(got, want), int(ledger.summary()["bytes_sent"]) == predicted
