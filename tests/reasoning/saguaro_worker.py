"""What the two ranks do in the tests of drafts on a rank of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from partsong.parallel import Mesh
from partsong.parallel.ranks.objects import ObjectInbox, apart, receive_object, send_object
from partsong.reasoning import Request
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.speculation.draft_line import DraftOrder, DraftReply
from partsong.reasoning.local.speculation.draft_server import DraftServer, serve_drafts
from partsong.reasoning.local.speculation.saguaro import Saguaro, SaguaroDrafter
from partsong.samplers.text import SpeculativeDecoder, causal, decode, load_text_model
from partsong.samplers.text.runner import StockTextModel
from tests.parallel.ranks import gathered, refusal
from tests.reasoning.drafters import FREE
from tests.reasoning.local_models import all_of, engine, llama, request, tokenizer

SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})
TEXTS = ("abcabcabc", "the quick brown fox", "zz")
#: The drafter's model by how often it is right, the requests that are answered at once, and whether everything that may
#: be asked for is prepared before the next order is read.
CASES: tuple[tuple[str, tuple[int, ...], bool], ...] = (
    ("same", (0,), True),
    ("near", (1,), False),
    ("near", (0, 1, 2), True),
    ("far", (0, 2), False),
)


def requests(which: tuple[int, ...], tokens: int = 24) -> list[Request]:
    return [request(TEXTS[n], seed=n, max_tokens=tokens, **SETTINGS[n]) for n in which]


def second(kind: str) -> LlamaForCausalLM:
    """The model itself, one near it, or one that knows nothing of it."""
    if kind == "far":
        return llama(seed=3)
    model = llama()
    if kind == "near":
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.005 * torch.randn_like(weight)
    return model


def knobs(mesh: Any, kind: str, **more: Any) -> Saguaro:
    return Saguaro(model=second(kind), mesh=mesh, cost=0.1, length=4, **more)


def texts_and_counts(local: LocalEngine, asked: list[Request]) -> dict[str, Any]:
    (drafter,) = local.speculator.drafters
    assert isinstance(drafter, SaguaroDrafter)
    answers = asyncio.run(all_of(local, asked))
    counts = drafter.counts
    return {
        "tokens": [answer.tokens for answer in answers],
        "drafted": sum(answer.usage.drafted for answer in answers),
        "rejected": sum(answer.usage.rejected for answer in answers),
        "hits": counts.hits,
        "others": counts.deepened + counts.misses + counts.unread,
        "seconds": counts.seconds,
        "lengths": local.speculator.lengths.means(),
    }


def answers() -> list[dict[str, Any]]:
    """Answers every case, one engine after the other on the same ranks."""
    rows = []
    with Mesh(pipe=2) as mesh:
        for kind, which, is_thorough in CASES:
            drafter = knobs(mesh, kind)
            if mesh.rank == 1:
                with pytest.MonkeyPatch.context() as patch:
                    if is_thorough:
                        patch.setattr(ObjectInbox, "is_there", False)
                    serve_drafts(drafter, tokenizer())
            else:
                rows.append(
                    texts_and_counts(engine(speculate=drafter, step_costs=FREE, end_tokens=()), requests(which))
                )
    return rows


def texts_of_decoders(folder: str) -> dict[str, Any]:
    """What `decode` and ``generate`` write with the model itself as the drafter, and without it."""
    heats, prompts = (0.0, 1.0), [[5, 6, 7, 5, 6], [9, 10]]
    model, rows = load_text_model(folder, dtype=torch.float64), dict[str, Any]()
    assert isinstance(model, StockTextModel)
    stock: Any = model.module
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 3, "stop_token_ids": ()}
    asked: dict[str, Any] = {"attention_mask": torch.tensor([[1] * 5]), "max_new_tokens": 20, "pad_token_id": 0}
    with Mesh(pipe=2) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "usual_costs", lambda *model: FREE)
        drafter = Saguaro(model=second("same"), mesh=mesh, cost=0.01, length=4)
        for heat in heats:
            if mesh.rank == 1:
                serve_drafts(drafter, tokenizer())
                serve_drafts(drafter, tokenizer())
                continue
            found = decode(model, prompts, temperature=heat, speculate=drafter, **options)
            plain = decode(model, prompts, temperature=heat, **options)
            rows[f"decode, {heat}"] = found.tokens == plain.tokens, found.summary()
            ids, speculative = torch.tensor(prompts[:1]), SpeculativeDecoder(speculate=drafter, seed=3)
            texts = [
                stock.generate(ids, custom_generate=each, do_sample=heat > 0, **asked).tolist()
                for each in (speculative, SpeculativeDecoder(speculate=None, seed=3))
            ]
            cost = speculative.last
            assert cost is not None
            rows[f"generate, {heat}"] = texts[0] == texts[1], {
                "tokens_drafted": cost.drafted, "tokens_rejected": cost.rejected,
            }  # fmt: skip
    return rows


def _leave(folder: str, how: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("bad luck in the third step")


def fail(victim: int, how: str, folder: str) -> None:
    """In the third step the victim is killed or raises: rank 1 while it drafts, rank 0 while it verifies."""
    if victim == 1:
        _third(DraftServer, "answer", lambda: _leave(folder, how))
    with Mesh(pipe=2) as mesh:
        if mesh.rank == 1:
            serve_drafts(knobs(mesh, "near"), tokenizer())
            return
        local = engine(speculate=knobs(mesh, "near"), step_costs=FREE, end_tokens=())
        if victim == 0:
            # The engine is not closed: the program ends with the error.
            asyncio.run(local.generate(requests((1,))[0]))
            _leave(folder, how)
        asyncio.run(all_of(local, requests((1,))))


def _third(kind: type, name: str, act: Callable[[], None]) -> None:
    inner, calls = getattr(kind, name), []

    def outer(self: Any, order: DraftOrder) -> DraftReply:
        calls.append(order)
        if len(calls) == 3:
            act()
        return inner(self, order)

    setattr(kind, name, outer)


def refusals() -> list[list[str]]:
    """What each rank says of a drafter with other tokens, of no model, and of the other rank's work."""
    with Mesh(pipe=2) as mesh:
        rows = []
        for model in ("lists-ar", "not-there"):
            drafter = Saguaro(model=model, mesh=mesh)
            rows.append(
                refusal(lambda drafter=drafter: serve_drafts(drafter))
                if mesh.rank
                else refusal(lambda drafter=drafter: engine(speculate=drafter))
            )
        drafter = knobs(mesh, "same")
        rows.append(
            refusal(lambda: engine(speculate=drafter))
            if mesh.rank
            else refusal(lambda: serve_drafts(drafter, tokenizer()))
        )
        return gathered(rows)


def objects_there_and_back() -> list[Any]:
    """Sends objects of one message and of two to the other rank, which has an inbox, and returns what comes back."""
    with Mesh(pipe=2) as mesh:
        there, back, returned = apart(mesh.axis("pipe")), apart(mesh.axis("pipe")), list[Any]()
        inbox = ObjectInbox(there, 0, name="objects") if mesh.rank else None
        for value in ("short", "long" * 5000, None):
            if inbox is not None:
                inbox.ask()
                send_object(back, 0, [inbox.take()], name="objects back")
            else:
                send_object(there, 1, value, name="objects")
                returned.append(receive_object(back, 1, name="objects back"))
        if inbox is not None:
            inbox.close()
        return returned
