"""Threads that join in the engine, against one forward of the stock model with a mask and positions of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.calls.text_tree import Fork, Part
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prompt import Prompt, prompt_of
from partsong.reasoning.local.scheduler import Scheduler
from partsong.reasoning.local.stops import AnswerText
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from partsong.reasoning.local.ticket import Ticket
from partsong.reasoning.threads.layout import ThreadLayout, TokenRun, encoded, lay_out, num_tokens
from tests import covering
from tests.reasoning.local_models import tokenizer
from tests.reasoning.test_local_models import tiny

FAMILIES = ("llama", "qwen2", "qwen3")
SMALL = {"vocab_size": 31, "max_position_embeddings": 256, "initializer_range": 0.4}


def masked(model: Any, row: ThreadLayout, thoughts: ThoughtEmbeddings | None = None) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of one forward in which every pair is looked up."""
    handles = [] if thoughts is None else thoughts.attach(model)
    bias = torch.full((len(row.tokens),) * 2, -torch.inf, dtype=model.dtype).triu_(1)
    for h in row.hidden:
        bias[h.query_first : h.query_end, h.key_first : h.key_end] = -torch.inf
    with torch.no_grad(), (thoughts or ThoughtEmbeddings(1, 1)).at([row.marks]):
        found = model(
            torch.tensor([row.tokens]), attention_mask=bias[None, None], position_ids=torch.tensor([row.positions])
        )
    for handle in handles:
        handle.remove()
    return found.logits[0]


# --- any tree: 150 of them, and with --full 1,002 ---------------------------------------------------------------------


def random_tree(dice: random.Random, depth: int = 0) -> tuple[TokenRun | Fork, ...]:
    """Few different tokens, so that texts begin alike, end within each other, and fork where others go on."""
    parts: list[TokenRun | Fork] = []
    for _ in range(dice.randint(1, 2)):
        parts.append(TokenRun(tuple(dice.choices((3, 4, 5), k=dice.randint(1 if not depth else 0, 4)))))
        if depth < 3 and dice.random() < 0.5:
            threads = tuple(random_tree(dice, depth + 1) for _ in range(dice.randint(1, 3)))
            marks = tuple(dice.randint(0, 3) for _ in threads) if dice.random() < 0.5 else ()
            parts.append(Fork(threads, marks, apart=dice.random() < 0.15))
    if not depth or dice.random() < 0.8:
        parts.append(TokenRun(tuple(dice.choices((3, 4, 5), k=dice.randint(1, 3)))))
    return tuple(parts)


def ticket(parts: tuple[TokenRun | Fork, ...]) -> Ticket:
    prompt = Prompt(parts, goes_on=True, num_tokens=num_tokens(parts), end=0)
    text = AnswerText(tokenizer())
    ask = Parameters(max_tokens=1, temperature=0)
    return Ticket(prompt, ask, 0, 1, frozenset(), text)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_what_the_engine_computes_is_what_training_sees(family: str) -> None:
    """The same tree as a prompt, a chunk at a time among other prompts, and as one masked row: the same logits."""
    module, dice = tiny(family, **SMALL), random.Random(family)
    thoughts = ThoughtEmbeddings.of(module, num_marks=4)
    generator = torch.Generator().manual_seed(1)
    for table in thoughts.parameters():
        table.data = torch.randn(table.shape, generator=generator, dtype=table.dtype) * 0.5
    model, plain = LocalModel(tiny(family, **SMALL), thoughts=thoughts), module
    scheduler = Scheduler(model, max_rows=8, prefill_chunk=12, kept_tokens=400)
    for _ in range(167 if covering.FULL else 25):
        trees = [random_tree(dice) for _ in range(2)]
        tickets = [ticket(tree) for tree in trees]
        scheduler.waiting += tickets
        found: dict[int, torch.Tensor] = {}
        while scheduler.tickets:
            for held, node in scheduler._held:
                if node.complete and node.logits is not None:
                    found[id(held)] = node.logits
            before = list(scheduler._held)
            scheduler.turn()
            found |= {id(held): node.logits for held, node in before if node.logits is not None}
            found |= {id(row.ticket): torch.empty(0) for row in scheduler.batch.rows}
        for tree, asked in zip(trees, tickets, strict=True):
            wanted = masked(plain, lay_out(tree), thoughts)[-1]
            assert asked.answer == [int(wanted.argmax())]
            if found.get(id(asked), torch.empty(0)).numel():
                assert (found[id(asked)] - wanted).abs().max() < 1e-11 * wanted.abs().max()
    model.close()


# --- calls ------------------------------------------------------------------------------------------------------------


class Counted(LocalEngine):
    """Counts the tokens that went through the model."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.computed, inner = 0, self.model.forward

        def forward(tokens: Sequence[int], *rest: Any) -> torch.Tensor:
            self.computed += len(tokens)
            return inner(tokens, *rest)

        self.model.forward = forward  # type: ignore[method-assign]


#: The text is gone on with where a stop string ends it; here that never comes.
async def say(engine: LocalEngine, parts: tuple[Part, ...], tokens: int, seed: int = 0) -> Completion:
    chat = [Message("user", ("what is it",))] + ([Message("assistant", parts)] if parts else [])
    ask = Parameters(max_tokens=tokens, temperature=1.0, logprobs=1, stop=("#",))
    return await engine.generate(Request(messages=tuple(chat), parameters=ask, seed=seed))


async def forked(engine: LocalEngine) -> tuple[tuple[Part, ...], Completion, list[Completion]]:
    """A text that forks in two, the first of which forks in three; all threads of unequal lengths."""
    main = await say(engine, (), 5)
    inside = (main.piece, "a:")
    first, second = await asyncio.gather(say(engine, inside, 4, 1), say(engine, (main.piece, "bb:"), 9, 2))
    deep = [(*inside, first.piece, f"{letter * (i + 1)}.") for i, letter in enumerate("xyz")]
    inner = await asyncio.gather(*(say(engine, parts, 3 + i, 3 + i) for i, parts in enumerate(deep)))
    nested = Fork(tuple((parts[-1], found.piece, " end") for parts, found in zip(deep, inner, strict=True)))
    after = (main.piece, Fork((("a:", first.piece, nested),)), " then")
    third = await say(engine, after, 4, 9)
    threads = ("a:", first.piece, nested, " then", third.piece), ("bb:", second.piece, " end")
    whole = (main.piece, Fork(threads), " so")
    last = await say(engine, whole, 6, 10)
    return (*whole, last.piece), last, [main, first, second, *inner, third, last]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_joined_keys_equal_one_masked_forward_and_nothing_is_computed_twice(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    module = tiny(family, **SMALL).to(dtype)
    letters = tokenizer()

    async def main() -> tuple[Any, ...]:
        engine = Counted(module, tokenizer=letters, end_tokens=())
        try:
            return *(await forked(engine)), engine.computed
        finally:
            await engine.close()

    parts, last, calls, computed = asyncio.run(main())
    head = TokenRun(tuple(letters("what is it").input_ids))
    tree = (head, *encoded(parts, lambda text: letters(text, add_special_tokens=False).input_ids))
    row = lay_out(tree)
    logprobs = masked(module, row).double().log_softmax(-1)
    begin = len(row.tokens) - len(last.tokens or ())
    for offset, (token, logprob) in enumerate(zip(last.tokens or (), last.logprobs or (), strict=True)):
        assert row.tokens[begin + offset] == token
        assert abs(float(logprobs[begin + offset - 1, token]) - logprob) < tolerance * 10
    # Every token of the tree went through the model once, but for the last one, behind which nothing was asked.
    assert computed == num_tokens(tree) - 1
    # The ledger says the same: what was neither there already nor drawn is what others put into the text, and the last
    # tokens drawn of each part, which had not been fed when it ended.
    drawn = sum(call.usage.completion for call in calls)
    fresh = sum(call.usage.prompt - call.usage.cached for call in calls)
    assert fresh == num_tokens(tree) - drawn + len(calls) - 1


def test_text_of_threads_reads_differently_from_the_same_words_in_a_row() -> None:
    module, letters = tiny("llama", **SMALL), tokenizer()
    fork = Fork(((" ab",), (" cd",)))

    async def main() -> list[Completion]:
        engine = LocalEngine(module, tokenizer=letters, end_tokens=())
        try:
            return [await say(engine, parts, 1) for parts in (("x", fork, "so"), ("x ab cdso",))]
        finally:
            await engine.close()

    joined, flat = asyncio.run(main())
    assert joined.usage.prompt == flat.usage.prompt
    assert joined.logprobs != flat.logprobs
    keys = {
        Request(messages=(Message("assistant", parts),)).key
        for parts in (("x", fork, "so"), ("x ab cdso",), ("x", Fork(((" ab", " cd"),)), "so"))
    }
    assert len(keys) == 3


def test_prompts_that_cannot_be_gone_on_with() -> None:
    chat = (Message("user", ("a",)),)
    with pytest.raises(ArgumentError, match="add the text that follows them"):
        prompt_of(tokenizer(), (*chat, Message("assistant", (Fork((("a",), ("b",))),))))
    with pytest.raises(ArgumentError, match="2 threads and 1 marks"):
        prompt_of(tokenizer(), (*chat, Message("assistant", (Fork((("a",), ("b",)), marks=(1,)), "c"))))
    with pytest.raises(ArgumentError, match="no threads"):
        prompt_of(tokenizer(), (*chat, Message("assistant", (Fork(()), "c"))))
    inside = prompt_of(tokenizer(), (*chat, Message("assistant", ("a", Fork((("b",),), marks=(2,))))))
    assert (inside.mark, inside.num_tokens, inside.end) == (2, 3, 3)


def test_threads_that_were_let_go_leave_nothing_behind() -> None:
    """Calls on a joined text that are cancelled before a token of it was computed, again and again."""
    module = tiny("llama", **SMALL)
    model = LocalModel(module)
    scheduler = Scheduler(model, max_rows=4, prefill_chunk=2, kept_tokens=0)
    tree = (TokenRun((3, 4, 5)), Fork(((TokenRun((6,) * 4),), (TokenRun((7,) * 5),))), TokenRun((8,)))
    with torch.inference_mode():
        for turns in range(6):
            asked = ticket(tree)
            scheduler.waiting.append(asked)
            for _ in range(turns):
                scheduler.turn()
            asked.cancelled = True
            scheduler.turn()
            assert not scheduler.tickets
            assert not list(scheduler.tree.nodes()) and scheduler.tree.tokens == 0
    model.close()
