"""Runs on every rank: prompts of causal models that are cut over ranks, against the same models on one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from partsong import ContextParallel, Ledger
from partsong.parallel import Mesh, mesh_for, parallelize, predict
from partsong.parallel.text.plan import TextPlan
from partsong.samplers.text import SpeculativeDecoder, decode
from tests.parallel.ranks import error, gathered, refusal
from tests.tiny_models.text import causal_model

FAMILIES = ("llama", "qwen3", "olmo2", "phi3", "gpt2", "mixtral")
#: Tokens of prompts: even pieces, uneven ones, and fewer than `SHORTEST`.
LENGTHS = (24, 19, 7)
SHORTEST = 8
CUT = ContextParallel(shortest=SHORTEST)


def ids_of(length: int, rows: int = 2) -> Tensor:
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(length))


def model_of(family: str) -> Any:
    model = causal_model(family)
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # others have no float64
    return model


def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits


def in_two_calls(model: Any, ids: Tensor) -> Tensor:
    """Logits of the second half of a prompt, and of a token after it."""
    cache, half = DynamicCache(config=model.config), ids.shape[1] // 2
    model(ids[:, :half], past_key_values=cache)
    second = model(ids[:, half:], past_key_values=cache).logits
    return torch.cat([second, model(ids[:, :1], past_key_values=cache).logits], dim=1)


def written(model: Any, ids: Tensor) -> list[Any]:
    """Texts by `decode`, by ``generate``, and by ``generate`` with drafts."""
    options = {"max_new_tokens": 6, "pad_token_id": 0}
    return [
        decode(model, ids, max_new_tokens=6, temperature=1.0, seed=3).tokens,
        decode(model, [ids[0, :9].tolist(), ids[1].tolist()], max_new_tokens=6).tokens,  # padded, so not cut
        model.generate(ids, **options).tolist(),
        model.generate(ids, custom_generate=SpeculativeDecoder(), **options).tolist(),
    ]


def padded(model: Any, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return model(ids, attention_mask=mask).logits[:, -1]


def sent(call: Any) -> int:
    with Ledger() as ledger:
        call()
    return int(ledger.summary()["bytes_sent"])


@torch.no_grad()
def compared(family: str, mesh: Mesh) -> dict[str, Any]:
    model, long = model_of(family), ids_of(LENGTHS[0])
    calls = {
        **{f"{length} tokens": functools.partial(logits, model, ids_of(length)) for length in LENGTHS},
        "its own positions": lambda: model(long, position_ids=torch.arange(2, 26)[None]).logits,
        "two texts in a row": lambda: (
            model(long[:1], position_ids=torch.arange(12).repeat(2)[None], use_cache=False).logits
        ),
        "embeddings": lambda: model(inputs_embeds=model.get_input_embeddings()(long)).logits,
        "the last logits": lambda: model(long, logits_to_keep=1).logits,
        "two calls": lambda: in_two_calls(model, long),
        "padding": lambda: padded(model, long),
    }
    want, texts = {name: call() for name, call in calls.items()}, written(model, long)
    with parallelize(model, CUT, mesh=mesh) as plan:
        assert isinstance(plan, TextPlan)
        errors = {name: error(call(), want[name]) for name, call in calls.items()}
        same = written(model, long) == texts
        compares = 4 * 8 * (mesh.world_size - 1)
        rows = {length: ids_of(length, 1) for length in LENGTHS}
        told = {
            length: (sent(functools.partial(model.base_model, ids)) - compares, plan.bytes_sent(length))
            for length, ids in rows.items()
        }
        said = plan.explain()
    calls = {length: predict(model, CUT, ranks=mesh.world_size, input_ids=ids) for length, ids in rows.items()}
    return {
        "errors": errors | {"afterwards": error(model(long).logits, want["24 tokens"])},
        "same": same,
        "told": told,
        "predicted": {length: call.bytes_per_step[mesh.rank] for length, call in calls.items()},
        "said": said,
    }


@torch.no_grad()
def refusals(mesh: Mesh) -> dict[str, str]:
    llama = model_of("llama")

    def asks_for_states() -> None:
        with parallelize(llama, CUT, mesh=mesh):
            llama(ids_of(24), output_hidden_states=True)

    def goes_on() -> None:
        """After a refusal in mid-call the model is as it was."""
        with parallelize(llama, CUT, mesh=mesh):
            refusal(lambda: llama(ids_of(24), output_hidden_states=True))
            llama(ids_of(24))

    windowed = causal_model("mistral", sliding_window=4)
    return {
        "states": refusal(asks_for_states),
        "goes on": refusal(goes_on),
        "window": refusal(lambda: parallelize(windowed, CUT, mesh=mesh)),
        "not causal": refusal(lambda: parallelize(causal_model("bert", is_decoder=False), CUT, mesh=mesh)),
    }


def run(nproc: int, families: list[str]) -> list[dict[str, Any]]:
    with Mesh(**mesh_for((CUT,), nproc)) as mesh:
        results: dict[str, Any] = {family: compared(family, mesh) for family in families}
        return gathered(results | {"refused": refusals(mesh)})
