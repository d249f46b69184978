"""Published drafters guess what their definitions say, whatever shares the batch, and change no text."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.speculation.published.drafter import Published, PublishedDrafter
from partsong.reasoning import Request
from partsong.samplers.text import SpeculativeDecoder, decode
from tests.reasoning.drafters import FREE
from tests.reasoning.local_models import LETTERS, all_of, engine, llama, request, tokenizer
from tests.reasoning.published import BLOCK, HIDDEN, LAYOUTS, Plain, write
from tests.reasoning.test_local_engine import mixed

VOCABULARY = len(LETTERS) + 2
Made = list[tuple[list[int], Any]]


@functools.cache
def model() -> Any:
    return llama(num_hidden_layers=6, hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1)


@functools.cache
def plain() -> list[str]:
    return [each.text for each in asyncio.run(all_of(engine(model()), mixed()))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    there = tmp_path_factory.mktemp("drafters")
    return {layout: write(there / layout, layout, VOCABULARY) for layout in LAYOUTS}


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The texts for which guesses were made, and the guesses."""
    seen: Made = []
    propose = PublishedDrafter.propose

    def noting(self: PublishedDrafter, texts: Any, rooms: Any) -> Any:
        trees = propose(self, texts, rooms)
        seen.extend((list(text.tokens), tree) for text, tree in zip(texts, trees, strict=True) if text.plain)
        return trees

    monkeypatch.setattr(PublishedDrafter, "propose", noting)
    return seen


def drafting(folder: Path, requests: list[Request], **knobs: Any) -> list[str]:
    how = {"speculate": Published(path=folder, **knobs), "step_costs": FREE, "prefill_chunk": 7}
    return [each.text for each in asyncio.run(all_of(engine(model(), **how), requests))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_without_it(folders: dict[str, Path], layout: str) -> None:
    assert drafting(folders[layout], mixed(), branches=2) == plain()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_guesses_are_those_of_the_definition(folders: dict[str, Path], proposed: Made, layout: str) -> None:
    """Prompts of different lengths in one batch, with common beginnings, in chunks and out of the cache."""
    texts = ("the quick brown fox", "the quick brown cat is not at home", "zz", "the quick brown fox")
    drafting(folders[layout], [request(text, max_tokens=9, temperature=0.0, seed=1) for text in texts])
    definition, guessed = Plain(folders[layout], model()), [made for made in proposed if len(made[1])]
    assert len(guessed) >= 8
    for tokens, tree in guessed:
        expected, sure = definition.guesses(tokens, len(tree))
        assert list(tree.tokens) == expected
        if layout == "dspark":
            assert tree.chances == pytest.approx(sure, abs=1e-10)


def test_a_block_is_no_longer_than_it_was_trained_for(folders: dict[str, Path], proposed: Made) -> None:
    asks = [request("the quick", max_tokens=9, temperature=0.0)]
    for layout, most in (("dflash", BLOCK - 1), ("dspark", BLOCK)):
        proposed.clear()
        drafting(folders[layout], asks)
        assert max(len(tree) for _, tree in proposed) == most
        with pytest.raises(ArgumentError, match=f"length=9, and this drafter guesses {most} tokens"):
            drafting(folders[layout], asks, length=9)


def test_right_guesses_are_counted(folders: dict[str, Path]) -> None:
    asks = [request("the quick", max_tokens=40, temperature=0.0)]
    how = {"speculate": Published(path=folders["eagle3"]), "step_costs": FREE}
    done = asyncio.run(all_of(engine(model(), **how), asks))
    assert done[0].usage.drafted > done[0].usage.rejected > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_and_generate_write_the_same_with_it(folders: dict[str, Path], proposed: Made, layout: str) -> None:
    """Prompts of different lengths in one batch, greedy and drawn."""
    prompts = [tokenizer()(text).input_ids for text in ("the quick brown fox", "zz", "a cat is at home")]
    text = f"published:path={folders[layout]},branches=2"
    for temperature in (0.0, 1.0):
        how: dict[str, Any] = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
        with_it = decode(model(), prompts, speculate=text, **how)
        assert with_it.tokens == decode(model(), prompts, **how).tokens
    definition, guessed = Plain(folders[layout], model()), proposed[:3]
    assert [tokens[:-1] for tokens, _ in guessed] == prompts
    for tokens, tree in guessed:
        first = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == 0]
        assert first[0] == definition.guesses(tokens, 1)[0][0]
    ids = torch.tensor([[0] * (19 - len(row)) + row for row in prompts])
    fed: dict[str, Any] = {"attention_mask": (ids > 0).long(), "max_new_tokens": 12, "do_sample": False}
    fast = model().generate(ids, custom_generate=SpeculativeDecoder(speculate=text), **fed)
    assert torch.equal(fast, model().generate(ids, **fed))


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedError, "is no drafter of EAGLE-3, DFlash or DSpark"),
        ({"target_layer_ids": [0, 5]}, UnsupportedError, "reads the states before layers [1, 6] of its model"),
        ({"target_layer_ids": [0, 1, 2]}, UnsupportedError, "give the drafter of this model"),
        ({"markov_head_type": "rnn"}, UnsupportedError, "Markov head is 'rnn'; 'vanilla' is known"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            UnsupportedError,
            "have sliding_attention attention",
        ),
        ({"mask_token_id": None}, ArgumentError, "does not say mask_token_id, which dspark needs"),
        ({"mask_token_id": 31}, UnsupportedError, "fills blocks with token 31, which this model does not know"),
        ({"num_hidden_layers": 3}, ArgumentError, "lacks 9 tensors of a drafter by dspark, layers.2.self_attn.q_proj"),
    ],
)
def test_what_does_not_fit_is_one_error(tmp_path: Path, changed: dict[str, Any], kind: Any, words: str) -> None:
    folder = write(tmp_path, "dspark", VOCABULARY, **changed)
    with pytest.raises(kind) as refused:
        engine(model(), speculate=Published(path=folder))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_weights_are_safetensors_only(tmp_path: Path) -> None:
    folder = write(tmp_path, "dflash", VOCABULARY)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"pytorch_model.bin is a pickle, which is never read"):
        engine(model(), speculate=f"published:path={folder}")


def test_another_models_drafter_is_refused(folders: dict[str, Path]) -> None:
    other = llama(num_hidden_layers=6, hidden_size=24, num_attention_heads=2, num_key_value_heads=1)
    with pytest.raises(UnsupportedError, match="the states of this model have 24; give the drafter of this model"):
        engine(other, speculate=Published(path=folders["dflash"]))
    small = llama(num_hidden_layers=6, hidden_size=HIDDEN, num_attention_heads=2, num_key_value_heads=1, vocab_size=20)
    with pytest.raises(UnsupportedError, match="guesses tokens that this model's 20 do not include"):
        engine(small, speculate=Published(path=folders["eagle3"]))


def test_states_are_in_the_models_type(folders: dict[str, Path]) -> None:
    half = model().to(torch.float32)
    try:
        asks = [request("the quick", max_tokens=6, temperature=0.0)]
        done = asyncio.run(all_of(engine(half, speculate=Published(path=folders["dspark"]), step_costs=FREE), asks))
        assert done[0].usage.completion == 6
    finally:
        model().to(torch.float64)
