"""What each rank does in the tests of layer-parallel drafts: the same calls, one step after the other, no thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.speculation.costs import costs_by_tokens
from partsong.kernels.speculation.speculator import Speculator
from partsong.ledger import Ledger
from partsong.parallel.layer_parallel import LayerParallel
from partsong.parallel.ranks.mesh import Mesh
from partsong.reasoning import Request
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prompt import prompt_of
from partsong.reasoning.local.scheduler import Scheduler
from partsong.reasoning.local.speculation.assistant import Assistant, AssistantDrafter
from partsong.reasoning.local.stops import AnswerText
from partsong.reasoning.local.ticket import Ticket
from tests.reasoning.drafters import FREE
from tests.reasoning.local_models import EOS, llama, request, tokenizer

LAYERS = 6
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9})


def draft_model() -> Any:
    """Deep enough for groups, and near enough to itself that groups of its layers guess right now and then."""
    return llama(seed=5, num_hidden_layers=LAYERS, initializer_range=0.2)


def requests() -> list[Request]:
    texts = ("abcabcabc", "the quick brown fox", "zz")
    return [request(text, seed=number, max_tokens=14, **SETTINGS[number]) for number, text in enumerate(texts)]


def ticket_of(asked: Request) -> Ticket:
    return Ticket(
        prompt=prompt_of(tokenizer(), asked.messages),
        parameters=asked.parameters,
        seed=asked.seed,
        max_tokens=asked.parameters.max_tokens,
        ends=frozenset({EOS}),
        text=AnswerText(tokenizer()),
    )


def write(
    group: int,
    mesh: Any = None,
    asked: Sequence[Request] | None = None,
    change: Callable[[AssistantDrafter], None] = lambda drafter: None,
) -> list[Ticket]:
    """Answers all requests with drafts of the same model in groups of layers."""
    model = LocalModel(draft_model())
    drafter = Assistant(model=draft_model(), cost=0.0, length=4, group=group, mesh=mesh).build(model, tokenizer())
    change(drafter)
    speculator = Speculator((drafter,), costs_by_tokens(FREE))
    scheduler = Scheduler(model, max_rows=8, prefill_chunk=64, kept_tokens=0, speculator=speculator)
    tickets = [ticket_of(each) for each in (requests() if asked is None else asked)]
    scheduler.waiting.extend(tickets)
    with torch.inference_mode():
        while scheduler.tickets:
            scheduler.turn()
    return tickets


def answers(group: int) -> dict[str, Any]:
    """Answers on the ranks of this run; returns what rank 0 has to say of all of them."""
    with Mesh(pipe=_world()) as mesh, Ledger() as ledger:
        tickets = write(group, mesh)
        sent = ledger.summary().get("bytes_sent", 0)
        return {
            "answers": [ticket.answer for ticket in tickets],
            "counts": [(ticket.drafted, ticket.rejected) for ticket in tickets],
            "sent": sent,
        }


def forward_bytes(group: int, tokens: int) -> list[tuple[int, int, float]]:
    """Returns bytes counted and predicted for a forward in groups, and its drift from the ranks' own serial twin."""
    model, ids = draft_model(), torch.arange(2, 2 + tokens)[None]
    with Mesh(pipe=_world()) as mesh, torch.no_grad():
        plain = model(ids).logits
        alone = _in_groups(model, ids, group, Mesh.axis(mesh, "ring"))
        layers = LayerParallel(model, group, mesh.axis("pipe"))
        rows = []
        for exact in (False, True):
            with Ledger() as ledger:
                if exact:
                    with layers.exact():
                        logits = model(ids, use_cache=False).logits
                else:
                    logits = model(ids, use_cache=False).logits
            drift = float((logits - (plain if exact else alone)).abs().max())
            predicted = layers.bytes_sent(tokens, model.config.hidden_size, 8)
            rows.append((int(ledger.summary().get("bytes_sent", 0)), predicted, drift))
        layers.undo()
        assert torch.equal(model(ids).logits, plain)
        return rows


def _in_groups(model: Any, ids: Tensor, group: int, alone: Any) -> Tensor:
    layers = LayerParallel(model, group, alone)
    logits = model(ids, use_cache=False).logits
    layers.undo()
    return logits


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
