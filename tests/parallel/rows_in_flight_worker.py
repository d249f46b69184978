"""Runs on every rank: language models whose rows go through the ranks one after another, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import Cache, DynamicCache, StaticCache

from partsong import LayerPipeline
from partsong.ledger import Ledger
from partsong.parallel import Mesh, parallelize, predict
from partsong.samplers.text import SpeculativeDecoder, decode
from tests.newer_names import or_reason, theirs
from tests.parallel.ranks import error, gathered, staying_connected
from tests.tiny_models.text import causal_model

#: What the prompts of four texts are padded to on the left, and how much of it is padding.
LENGTH, PADS = 7, (0, 3, 1, 5)
#: What else a family needs: positions that go beyond those it was trained for, and windows that texts outgrow.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "phi3": {
        "original_max_position_embeddings": 4,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
PROMPTS = [[3, 5, 7, 9, 11, 2, 4], [6, 8, 10, 12], [14, 3, 5, 7, 9, 11], [2, 4]]
#: How texts are decoded: by a causal model, by one with masks and by one with masks in blocks.
DECODED: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("llama", {}),
    "drafts": ("llama", {"speculate": ["ngram", "jacobi"]}),
    "masked": ("llama", {"adapter": "mdlm"}),
    "masked, old keys": ("llama", {"adapter": "mdlm", "cache": "dual"}),
    "blocks": ("qwen3", {"adapter": "bd3"}),
}


def model_of(family: str) -> Any:
    """A random model of five layers in float64."""
    model = causal_model(family, num_hidden_layers=5, eos_token_id=None, **FAMILIES.get(family, {}))
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # others have no float64
    return model


def call() -> dict[str, torch.Tensor]:
    """A prompt for each row, padded."""
    ids = torch.arange(4 * LENGTH).view(4, LENGTH) % 50 + 2
    mask = torch.arange(LENGTH) >= torch.tensor(PADS)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@torch.no_grad()
def written(model: Any, cache: Cache | None) -> torch.Tensor:
    """Logits of prompts and of three more tokens of each, by the cache; those of padding are left out."""
    given = call()
    mask, places = given["attention_mask"], given["position_ids"]
    out = model(**given, past_key_values=cache, use_cache=True)
    logits = [out.logits[mask.bool()]]
    for step in range(3):
        mask, places = torch.cat([mask, mask[:, -1:]], 1), places[:, -1:] + 1
        ids = torch.tensor([[5], [9], [13], [17]]) + step
        more = {"attention_mask": mask, "position_ids": places, "past_key_values": out.past_key_values}
        out = model(ids, **more, use_cache=True)
        logits.append(out.logits[:, 0])
    return torch.cat(logits)


@torch.no_grad()
def called(mesh: Mesh, family: str, smallest: int, cache: Callable[[Any], Cache] | None = None) -> dict[str, Any]:
    """Calls with a cache, and what a call sends."""
    model = model_of(family)

    def logits() -> torch.Tensor:
        return written(model, None if cache is None else cache(model.config))

    strategy, want, ids = LayerPipeline(smallest=smallest), logits(), call()["input_ids"]
    with parallelize(model, strategy, mesh=mesh) as plan:
        distance = error(logits(), want)
        with_keys = plan.explain()
        model(ids)
        said = plan.explain()
        with Ledger() as ledger:
            model(ids)
    sent = ledger.summary()["bytes_sent"]
    predicted = or_reason(lambda: _predicted(family, strategy, mesh))
    return {
        "error": max(distance, error(logits(), want)),
        "said": said,
        "with keys": with_keys,
        "bytes": (sent, predicted),
    }


def _predicted(family: str, strategy: LayerPipeline, mesh: Mesh) -> int:
    """The bytes that a call is predicted to send, if the positions of the family can be computed from shapes only."""
    rotary = copy.deepcopy(model_of(family).model.rotary_emb).to("meta")
    places = torch.empty(1, LENGTH, dtype=torch.int64, device="meta")
    theirs(lambda: rotary(torch.empty(1, LENGTH, 1, device="meta"), position_ids=places))
    ids = call()["input_ids"]
    return predict(model_of(family), strategy, ranks=mesh.world_size, input_ids=ids).bytes_per_step[mesh.rank]


@torch.no_grad()
def changed_between(mesh: Mesh) -> dict[str, Any]:
    """A model that does more between its layers."""
    model = model_of("llama")
    layer: Any = model.model.layers[1]

    class Louder(type(layer)):
        def __call__(self, states: torch.Tensor, *given: Any, **named: Any) -> Any:
            return super().__call__(states * 1.5, *given, **named)

    layer.__class__ = Louder
    want = written(model, None)
    with parallelize(model, LayerPipeline(smallest=1), mesh=mesh) as plan:
        return {"error": error(written(model, None), want), "said": plan.explain()}


@torch.no_grad()
def watched(mesh: Mesh) -> dict[str, Any]:
    """What a hook on each layer sees of a call, by the layers of this rank."""
    model, ids, seen = model_of("llama"), call()["input_ids"], list[tuple[int, torch.Tensor]]()
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda layer, given, states, number=number: seen.append((number, states)))
    model(ids)
    want = dict(seen)
    with parallelize(model, LayerPipeline(smallest=1), mesh=mesh) as plan:
        seen.clear()
        model(ids)
        mine = plan.layers_here(len(model.model.layers))
        assert [number for number, _ in seen if number in mine] == list(mine), "each layer is called once"
        return {
            "error": max(error(states, want[number]) for number, states in seen if number in mine),
            "said": plan.explain(),
        }


def decoded(mesh: Mesh, name: str) -> bool:
    """Whether four texts are the same, greedily and with noise."""
    family, options = DECODED[name]
    model = model_of(family)
    model.config.mask_token_id = 60 if "adapter" in options else None

    def texts() -> list[Any]:
        how = {"max_new_tokens": 6, "seed": 3, **options}
        return [decode(model, PROMPTS, temperature=heat, **how).tokens for heat in (0.0, 1.0)]

    alone = texts()
    with parallelize(model, LayerPipeline(smallest=1), mesh=mesh):
        return texts() == alone


def generated(mesh: Mesh) -> bool:
    """Whether ``generate`` writes the same from prompts of different lengths, plainly, in beams and with drafts."""
    model = model_of("llama")
    given = call()
    given.pop("position_ids")

    def texts() -> list[Any]:
        more: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"custom_generate": SpeculativeDecoder()}]
        named = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
        return [model.generate(**given, **named, **each).tolist() for each in more]

    alone = texts()
    with parallelize(model, LayerPipeline(smallest=1), mesh=mesh):
        return texts() == alone


@torch.no_grad()
def in_flight(mesh: Mesh) -> float:
    """Lets the second stage begin its last layer for the first row only once the first stage has the second row."""
    model, ids = model_of("llama"), call()["input_ids"]
    want, begun = model(ids).logits, []

    def tell(*call: Any) -> None:
        begun.append(torch.ones(1))
        if len(begun) == 2:
            dist.send(begun[1], 1, tag=1)

    def listen(*call: Any) -> None:
        begun.append(torch.zeros(1))
        if len(begun) == 1:
            dist.recv(begun[0], 0, tag=1)

    with parallelize(model, LayerPipeline(smallest=1), mesh=mesh):
        layer = model.model.layers[-mesh.rank].self_attn  # of the first layer in the first stage, or the last one
        hook = layer.register_forward_pre_hook(listen if mesh.rank else tell)
        got = model(ids).logits
        hook.remove()
    assert len(begun) == 4, "each stage has each row once"
    return error(got, want)


@staying_connected
def run(nproc: int) -> list[dict[str, Any]]:
    """All cases: what each rank measured."""
    torch.set_num_threads(1)
    with Mesh(pipe=nproc, timeout=60.0) as mesh:
        found: dict[str, Any] = {family: called(mesh, family, 1) for family in FAMILIES}
        found["two parts"] = called(mesh, "llama", 2 * LENGTH)
        found["whole"] = called(mesh, "llama", 128)
        found["lazy cache"] = called(mesh, "llama", 1, lambda config: DynamicCache())
        found["static cache"] = called(mesh, "llama", 1, lambda config: StaticCache(config, max_cache_len=12))
        found["changed between"] = changed_between(mesh)
        found["watched"] = watched(mesh)
        found |= {f"decoded, {name}": decoded(mesh, name) for name in DECODED}
        found["generated"] = generated(mesh)
        if nproc == 2:
            found["in flight"] = in_flight(mesh)
    return gathered(found)
