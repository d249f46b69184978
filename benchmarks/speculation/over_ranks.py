"""Measures drafts on a rank of their own: ``python benchmarks/speculation/over_ranks.py``.

A model writes one long text plainly, with a second model in the same process, and with that on a rank of its own, which
prepares drafts while steps are verified. The three take turns, a piece of the text each.

No small relative of a larger model is at hand, so the weights are random, and all layers but the first ones are damped:
these alone are then a second model that is often right. How often is a choice (``damping``); what is measured is what
that is worth. Each process has one thread. The second rank waits, and computes nothing, while others have their turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.filing import file_result, markdown_table, result_path, spread
from partsong.kernels.speculation.costs import costs_by_tokens, usual_costs
from partsong.kernels.speculation.speculator import Speculator
from partsong.parallel import Mesh, launch
from partsong.reasoning import Message, Parameters
from partsong.reasoning.local.loading import load_tokenizer
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prompt import prompt_of
from partsong.reasoning.local.scheduler import Scheduler
from partsong.reasoning.local.speculation.assistant import Assistant
from partsong.reasoning.local.speculation.draft_server import serve_drafts
from partsong.reasoning.local.speculation.saguaro import Saguaro, SaguaroDrafter
from partsong.reasoning.local.stops import AnswerText
from partsong.reasoning.local.ticket import Ticket

PROMPT = "copy : dog ant cat bee owl ="


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    tokens: int = 4000
    """Tokens of the text."""
    piece: int = 250
    """Tokens that a case writes before the next one has its turn."""
    layers: int = 16
    """Layers of the model."""
    draft_layers: int = 2
    """Layers of the second model, the first ones of the model."""
    damping: float = 0.1
    """What the other layers add, by what they would."""
    temperature: float = 1.0
    """Temperature of the text."""
    length: int = 6
    """Guesses of a draft, at most."""


def models(config: Config, vocabulary: int) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Makes the model, with layers as wide as those of SmolLM2-135M, and the second one, which is its first layers."""
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "initializer_range": 0.06,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=config.layers)).eval()
    with torch.no_grad():
        layers: Any = list(model.model.layers)[config.draft_layers :]
        for layer in layers:
            layer.self_attn.o_proj.weight *= config.damping
            layer.mlp.down_proj.weight *= config.damping
    second = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=config.draft_layers)).eval()
    weights = model.state_dict()
    second.load_state_dict({name: weights[name] for name in second.state_dict()})
    return model, second


@dataclass
class Case:
    """Writes the text in one way.

    Attributes:
        name: what the table calls it.
        scheduler: takes the steps.
        ticket: the text.
        seconds: those of each piece.
    """

    name: str
    scheduler: Scheduler
    ticket: Ticket
    seconds: list[float] = field(default_factory=list)

    def write(self, tokens: int) -> None:
        """Goes on until the text has as many tokens; longer drafts may add a few."""
        begin = time.perf_counter()
        while len(self.ticket.answer) < tokens:
            self.scheduler.turn()
        self.seconds.append(time.perf_counter() - begin)


def case(name: str, model: LocalModel, tokenizer: Any, config: Config, knobs: Sequence[Any]) -> Case:
    """Makes a case with a scheduler of its own; all of them compute with the same model."""
    costs = costs_by_tokens(usual_costs(model.num_weights, torch.backends.cpu.get_cpu_capability()))
    drafters = tuple(each.build(model, tokenizer) for each in knobs)
    speculator = Speculator(drafters, costs, vocabulary=model.vocab_size)
    scheduler = Scheduler(model, max_rows=1, prefill_chunk=1024, kept_tokens=0, speculator=speculator)
    parameters = Parameters(max_tokens=config.tokens, temperature=config.temperature)
    ticket = Ticket(
        prompt=prompt_of(tokenizer, (Message("user", (PROMPT,)),)),
        parameters=parameters,
        seed=5,
        max_tokens=config.tokens,
        ends=frozenset(),
        text=AnswerText(tokenizer),
    )
    scheduler.waiting.append(ticket)
    return Case(name, scheduler, ticket)


def measure(config: Config) -> list[dict[str, Any]]:
    """Runs on both ranks; the first one returns the rows."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer("lists-ar")
    tokenizer.chat_template = None
    module, second = models(config, len(tokenizer))
    second.config.name_or_path = "the first layers"
    assistant = Assistant(model=second, length=config.length)
    with Mesh(pipe=2) as mesh, torch.inference_mode():
        saguaro = Saguaro(model=second, length=config.length, mesh=mesh)
        if mesh.rank == 1:
            serve_drafts(saguaro, tokenizer)
            return []
        model = LocalModel(module)
        cases = [
            case("plain", model, tokenizer, config, ()),
            case("second model in the same process", model, tokenizer, config, (assistant,)),
            case("second model on a rank of its own", model, tokenizer, config, (saguaro,)),
        ]
        for end in range(config.piece, config.tokens + 1, config.piece):
            for each in cases:
                each.write(end)
            print(end, *(f"{each.seconds[-1]:.1f}" for each in cases), flush=True)
        rows = [row(each, cases[0]) for each in cases]
        cases[-1].scheduler.speculator.close()
        return rows


def row(each: Case, plain: Case) -> dict[str, Any]:
    """Says what a case took."""
    ratios = sorted(a / b for a, b in zip(plain.seconds, each.seconds, strict=True))
    (drafter,) = each.scheduler.speculator.drafters or (None,)
    counts = drafter.counts if isinstance(drafter, SaguaroDrafter) else None
    return {
        "name": each.name,
        "tokens": len(each.ticket.answer),
        "differing_tokens": sum(a != b for a, b in zip(plain.ticket.answer, each.ticket.answer, strict=True)),
        "seconds": sum(each.seconds),
        "ratio_to_plain": ratios[len(ratios) // 2],
        "drafted": each.ticket.drafted,
        "rejected": each.ticket.rejected,
        "hits": counts.hits if counts else None,
        "deepened": counts.deepened if counts else None,
        "misses": counts.misses if counts else None,
        "seconds_waiting_for_drafts": counts.seconds if counts else None,
        "lengths": each.scheduler.speculator.lengths.means(),
        "piece_seconds": each.seconds,
    }


def main(config: Config) -> None:
    """Measures and writes the files."""
    rows = launch(measure, 2, config)
    columns = [name for name in rows[0] if name not in ("lengths", "piece_seconds")]
    shown = [[_shown(each[name]) for name in columns] for each in rows]
    table = markdown_table(columns, shown)
    drafting = rows[1:]
    spans = sorted({begin for each in drafting for begin in each["lengths"]})
    lengths = [[f"from {begin}", *(_shown(each["lengths"].get(begin)) for each in drafting)] for begin in spans]
    table += "\n\nTokens per step, by where in the text:\n\n"
    table += markdown_table(["tokens", *(each["name"] for each in drafting)], lengths)
    note = (
        f"Random Llama of {config.layers} layers, 576 wide, of which all but the first {config.draft_layers} are "
        f"damped to {config.damping}; those {config.draft_layers} alone are the second model. One text of "
        f"{config.tokens} tokens at temperature {config.temperature}, one thread a process, in turns of {config.piece} "
        "tokens; `ratio_to_plain` is the median over turns. `hits` are drafts that were prepared and answered at once, "
        "`deepened` were prepared and grew while the model waited, `misses` were not prepared."
    )
    spreads = {each["name"]: spread(each["piece_seconds"]) for each in rows}
    file_result(config.out, __file__, rows, "Drafts on a rank of their own", note, table, spreads=spreads)


def _shown(value: Any) -> Any:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else value


if __name__ == "__main__":
    main(tyro.cli(Config))
