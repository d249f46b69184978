"""Runs on every rank: a video model whose layers choose the blocks of keys that their queries see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_kandinsky
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from partsong import ClipParallel, DisplacedPatch, PatchPipeline, Ring, SyncPatch, TokenRing, Ulysses, Usp
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.exchange import ulysses
from partsong.samplers import generate
from tests.parallel.ranks import error, gathered, on_first, refusal, staying_connected
from tests.pipelines.cases import CASES

#: Two frames of 8 x 24 tokens: six blocks of 64.
SIZE = {"height": 128, "width": 384, "num_frames": 5, "num_inference_steps": 3}
STRATEGIES: dict[str, Strategy] = {
    "Ulysses": Ulysses(),
    "Ulysses in one wave": Ulysses(waves=1),
    "Ring": Ring(),
    "Ring, doubling": Ring(blocks="doubling"),
    "Usp": Usp(ulysses_degree=2, ring_degree=2),
}
REFUSED: dict[str, Strategy] = {
    "DisplacedPatch": DisplacedPatch(),
    "SyncPatch": SyncPatch(),
    "TokenRing": TokenRing(),
    "PatchPipeline": PatchPipeline(),
    "ClipParallel": ClipParallel(),
}


def pipe_of(**config: Any) -> Any:
    pipe = CASES["Kandinsky5T2VPipeline"].build()
    pipe.resolutions = [(SIZE["width"], SIZE["height"])]
    nabla = {"attention_type": "nabla", "attention_P": 0.4, "attention_wT": 1, "attention_wH": 1, "attention_wW": 1}
    pipe.transformer.register_to_config(**nabla | config)
    return pipe


def call(pipe: Any, **more: Any) -> Tensor:
    asked = CASES["Kandinsky5T2VPipeline"].call(1) | SIZE | more
    return pipe(**asked, generator=torch.Generator().manual_seed(1)).frames


@contextmanager
def written_out(shares: list[float]) -> Iterator[None]:
    """Lets the model attend by the masks that it makes itself, which torch's own operator does not take."""
    inner = transformer_kandinsky.dispatch_attention_fn

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **options: Any) -> Tensor:
        if not isinstance(attn_mask, BlockMask):
            return inner(q, k, v, attn_mask=attn_mask, **options)
        counts, places = attn_mask.full_kv_num_blocks, attn_mask.full_kv_indices
        assert counts is not None and places is not None and not attn_mask.kv_num_blocks.any()
        mask = torch.zeros(*places.shape, dtype=torch.bool)
        for at in torch.cartesian_prod(*(torch.arange(size) for size in counts.shape)).tolist():
            mask[tuple(at)][places[tuple(at)][: counts[tuple(at)]].long()] = True
        shares.append(mask.double().mean().item())
        mask = mask.repeat_interleave(64, 2).repeat_interleave(64, 3)
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_kandinsky, "dispatch_attention_fn", attend)
        yield


def _serial() -> tuple[Tensor, Tensor, list[float]]:
    shares: list[float] = []
    with written_out(shares):
        sparse = call(pipe_of())
    return sparse, call(pipe_of(attention_type="regular")), shares


@staying_connected
def generated(nproc: int, names: list[str]) -> dict[str, Any]:
    """Latents over ranks against those of one process, bytes, and how heads were dealt out."""
    sparse, dense, shares = on_first(_serial)
    found: dict[str, Any] = {"shares": shares, "apart": error(dense, sparse)}
    for name in names:
        dealt: list[list[int]] = []
        with Mesh(**mesh_for((STRATEGIES[name],), nproc)) as mesh, pytest.MonkeyPatch.context() as patch:
            deal = ulysses.HeadDealer.order

            def order(self: Any, layer: int, heads: int, deal: Any = deal, dealt: list[list[int]] = dealt) -> list[int]:
                dealt.append(deal(self, layer, heads))
                return dealt[-1]

            patch.setattr(ulysses.HeadDealer, "order", order)
            pipe = pipe_of()
            with parallelize(pipe, STRATEGIES[name], mesh=mesh) as plan, Ledger(flops=False) as ledger:
                got = call(pipe)
                predicted = plan.explain().bytes_total()[mesh.rank]
            row = {
                "error": error(got, sparse), "sent": int(ledger.summary()["bytes_sent"]), "predicted": predicted,
                "dealt": dealt,
            }  # fmt: skip
            found[name] = gathered(row)
    return found


@staying_connected
def refusals() -> dict[str, list[str]]:
    """What each strategy without a form says, and what a video of too few blocks is told."""
    found = {}
    for name, strategy in (REFUSED | {"one block": Ulysses()}).items():
        with Mesh(**mesh_for((strategy,), 2)) as mesh, parallelize(pipe := pipe_of(), strategy, mesh=mesh) as plan:
            small = {"width": 128, "num_frames": 1} if name == "one block" else {}
            pipe.resolutions = [(small.get("width", SIZE["width"]), SIZE["height"])]
            found[name] = gathered(
                refusal(partial(call, pipe if plan.loop is None else partial(generate, plan), **small))
            )
    return found
