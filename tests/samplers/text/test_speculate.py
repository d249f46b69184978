"""`decode(speculate=...)`: whoever guesses, texts, ends and noise of causal models are those of decoding without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.jacobi import Jacobi
from partsong.kernels.speculation.ngram import Ngram
from partsong.samplers.text.causal_reader import CausalReader
from partsong.samplers.text.decode import Decoded, decode, decode_steps
from partsong.samplers.text.draft_reader import DraftReader
from partsong.samplers.text.events import Event
from partsong.samplers.text.families import ADAPTERS, DECODERS
from partsong.samplers.text.runner import StockTextModel
from tests.reasoning.drafters import Guessing, at_random, knowing, unruly
from tests.samplers.text import plain
from tests.samplers.text.test_runner import VOCAB, decoder

ROWS = [[5, 6, 7, 5, 6, 7, 5, 6], [4], [12, 13, 14], [1, 2, 1, 2, 1]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.3, "seed": 5},
    "warm": {"temperature": 1.0, "seed": [4, 3, 2, 2**64 - 1]},
}


def causal(kind: str = "llama", attention: str = "sdpa") -> StockTextModel:
    return StockTextModel(decoder(kind, attention), ADAPTERS["causal"], eos_token_ids=(3,))


def texts(decoded: Decoded) -> tuple[list[list[int]], list[str]]:
    return decoded.tokens, decoded.stopped


def whole(decoded: Decoded) -> list[list[int]]:
    return [[*prompt, *tokens] for prompt, tokens in zip(ROWS, decoded.tokens, strict=True)]


DRAFTERS: dict[str, Callable[[Decoded], Any]] = {
    "ngram": lambda known: "ngram",
    "jacobi": lambda known: "jacobi:window=5",
    "two": lambda known: [Ngram(num=2, length=5), "jacobi"],
    "random": lambda known: at_random(VOCAB),
    "right": lambda known: knowing(whole(known)),
    "wrong": lambda known: knowing(whole(known), lambda token: (token + 1) % VOCAB),
    "all": lambda known: ["ngram", Jacobi(), at_random(VOCAB), knowing(whole(known))],
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_those_of_decoding_without(drafter: str, settings: str) -> None:
    model = causal()
    options: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": [3, 20, 21], **SETTINGS[settings]}
    plainly = decode(model, ROWS, **options)
    fast = decode(model, ROWS, speculate=DRAFTERS[drafter](plainly), **options)
    assert texts(fast) == texts(plainly)
    drafted, rejected = (sum(getattr(tally, name) for tally in fast.tallies) for name in ("drafted", "rejected"))
    assert drafted > 0
    assert [tally.num_tokens for tally in fast.tallies] == [tally.num_tokens for tally in plainly.tallies]
    for tally, tokens in zip(fast.tallies, fast.tokens, strict=True):
        # A forward gives a token, and another for each guess that was right.
        assert tally.num_forwards + tally.drafted - tally.rejected == len(tokens)
    if drafter == "wrong":
        assert (rejected, fast.steps) == (drafted, plainly.steps)
    if drafter == "right":
        # One forward reads the prompts; each further one verifies six guesses and draws one more.
        longest = max(map(len, plainly.tokens))
        assert fast.steps == 1 + -(-(longest - 1) // 7)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", DECODERS)
def test_every_decoder(kind: str, attention: str) -> None:
    model = causal(kind, attention)
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 0.8, "stop_token_ids": []}
    plainly = decode(model, ROWS, **options)
    assert texts(decode(model, ROWS, speculate=at_random(VOCAB), **options)) == texts(plainly)


@pytest.mark.parametrize("kind", ["deep", "chances", "no tokens"])
@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_drafter_that_heeds_nothing_changes_nothing(num: int, kind: str) -> None:
    model = causal()
    options: dict[str, Any] = {"temperature": 0.5, "stop_token_ids": []}
    longer = decode(model, ROWS, max_new_tokens=20, **options)
    plainly = decode(model, ROWS, max_new_tokens=num, **options)
    fast = decode(model, ROWS, max_new_tokens=num, speculate=unruly(whole(longer), kind), **options)
    assert texts(fast) == texts(plainly)
    assert [tally.num_tokens for tally in fast.tallies] == [num] * len(ROWS)
    if num == 7:
        assert fast.steps < plainly.steps


@pytest.mark.parametrize("trees", [[], [DraftTree()], [None] * len(ROWS), None])
def test_a_drafter_that_proposes_no_trees_is_named(trees: Any) -> None:
    drafter = Guessing(guess=lambda tokens, room: DraftTree())
    drafter.propose = lambda texts, rooms: trees  # type: ignore[method-assign]
    with pytest.raises(ArgumentError, match="Guessing was asked for a DraftTree for each of 4 texts and proposed"):
        decode(causal(), ROWS, max_new_tokens=4, speculate=drafter)


def test_a_batch_is_its_rows() -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0.9, "speculate": ["ngram", "jacobi"]}
    batch = decode(causal(), ROWS, seed=[1, 2, 3, 4], **options)
    alone = [decode(causal(), [row], seed=[seed], **options).tokens[0] for seed, row in enumerate(ROWS, 1)]
    assert batch.tokens == alone


def test_events_and_progress_are_complete() -> None:
    model = causal()
    options: dict[str, Any] = {"max_new_tokens": 9, "stop_token_ids": [], "template": [[8], [], [9, 9], []]}
    plainly = decode(model, ROWS, **options)
    steps = list(decode_steps(model, ROWS, speculate=knowing(whole(plainly)), **options))
    events = sorted((event for step in steps for event in step.events), key=lambda event: (event.row, event.position))
    expected = [
        Event(kind="commit", row=row, position=len(prompt) + place, token=tokens[place])
        for row, (prompt, tokens) in enumerate(zip(ROWS, plainly.tokens, strict=True))
        for place in range(len(options["template"][row]), len(tokens))
    ]
    assert events == expected
    assert sum((step.finished for step in steps), ()) != ()
    for row, tokens in enumerate(plainly.tokens):
        assert [step.tokens[row] for step in steps if row in step.tokens][-1] == tokens


def test_a_stop_token_among_right_guesses_ends_the_text() -> None:
    model = causal()
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
    plainly = decode(model, ROWS[:1], stop_token_ids=[], **options)
    stop = next(token for place, token in enumerate(plainly.tokens[0]) if plainly.tokens[0].index(token) == place > 3)
    options["stop_token_ids"] = [stop]
    cut = decode(model, ROWS[:1], **options)
    fast = decode(model, ROWS[:1], speculate=knowing([[*ROWS[0], *plainly.tokens[0]]]), **options)
    assert texts(fast) == texts(cut)
    assert (fast.stopped, fast.tokens[0][-1], fast.steps < cut.steps) == (["stop token"], stop, True)


def test_drafters_forget_every_text() -> None:
    drafter = at_random(VOCAB)
    decode(causal(), ROWS, max_new_tokens=6, speculate=drafter)
    assert len(drafter.forgotten) == len(ROWS)
    for tokens, seen in drafter.seen:
        assert tuple(tokens[-len(seen.match.tokens) :]) == seen.match.tokens
        assert len(seen.match.drawn) == 1 + len(seen.draft)


def test_states_of_a_tree_are_those_of_its_paths() -> None:
    """Every node's state is the one that a fresh reading of the text and its path gives, in steps of any shape."""
    model, shown = causal(), [list(row) for row in ROWS]
    reader = DraftReader(model, ROWS, room=1)
    reader.begin()
    trees = [DraftTree((7, 9, 8, 2), (0, 0, 2, 1)), DraftTree(), DraftTree.chain([4, 4, 4]), DraftTree((1, 2), (0, 0))]
    kept = [[0, 2, 3], [0], [0, 1], [0]]
    for last in (10, 11, 12):
        states = iter(reader.verify([last] * len(ROWS), trees))
        for text, tree in zip(shown, trees, strict=True):
            for node in range(1 + len(tree)):
                path = [last, *(tree.tokens[each - 1] for each in tree.ancestors(node)[1:])]
                alone = CausalReader(model, [text + path], room=0).begin()[0]
                assert torch.allclose(next(states), alone, rtol=0, atol=1e-12)
        reader.keep_paths(kept)
        for text, tree, path in zip(shown, trees, kept, strict=True):
            text += [last, *(tree.tokens[node - 1] for node in path[1:])]


def masked() -> StockTextModel:
    return StockTextModel(plain.llama(), ADAPTERS["mdlm"], mask_token_id=plain.MASK)


@pytest.mark.parametrize(
    ("model", "options", "kind", "words"),
    [
        (
            causal,
            {"speculate": "nrgam"},
            ArgumentError,
            r"no drafter 'nrgam'; did you mean ngram\? The drafters are ngram, jacobi",
        ),
        (causal, {"speculate": "ngram:size=3"}, ArgumentError, "has no option 'size'"),
        (causal, {"speculate": [7]}, ArgumentTypeError, "found int"),
        (masked, {"speculate": "ngram"}, UnsupportedError, "the family 'mdlm' is not causal; .* verify"),
        (causal, {"speculate": "ngram", "cache": "none"}, UnsupportedError, "NoCache .* use cache='prefix'"),
        (causal, {"speculate": "ngram", "cache": "prefix:refresh_every=2"}, UnsupportedError, "PrefixCache computes"),
        (
            causal,
            {"speculate": Guessing(guess=lambda tokens, room: DraftTree(), layers=(1,), masks=1)},
            UnsupportedError,
            "looks ahead from masks",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(model: Any, options: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        decode(model(), [[1, 2]], max_new_tokens=2, **options)
