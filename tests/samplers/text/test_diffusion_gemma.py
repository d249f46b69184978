"""DiffusionGemma as a `TextModel` against its own forward: prompt, canvases, self-conditioning, rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from partsong import seeds
from partsong.errors import ArgumentError, UnsupportedError
from partsong.samplers.text.decode import decode
from partsong.samplers.text.diffusion_gemma import DiffusionGemmaTextModel
from partsong.samplers.text.loading import load_text_model
from tests.tiny_models.diffusion_gemma import CANVAS, diffusion_gemma

VOCAB, SLOTS = 29, 24
#: The module is in float64; its own forward rounds logits, norms and routers to float32.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def module() -> DiffusionGemmaForBlockDiffusion:
    return diffusion_gemma()


def wrapped(module: DiffusionGemmaForBlockDiffusion) -> DiffusionGemmaTextModel:
    model = load_text_model(module)
    assert isinstance(model, DiffusionGemmaTextModel)
    return model


def random_tokens(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


class Stock:
    """The module's own calls on one text: grow the encoder's cache, denoise a canvas."""

    def __init__(self, module: DiffusionGemmaForBlockDiffusion) -> None:
        self.module, self.cache = module, DynamicCache(config=module.config.get_text_config())

    @torch.no_grad()
    def encode(self, tokens: Tensor) -> None:
        self.module.model.encoder.language_model(input_ids=tokens, past_key_values=self.cache)

    @torch.no_grad()
    def denoise(self, canvas: Tensor, conditioning: Tensor | None) -> Tensor:
        return self.module(
            decoder_input_ids=canvas, past_key_values=self.cache, self_conditioning_logits=conditioning
        ).logits


def logits_of(model: DiffusionGemmaTextModel, hidden: Tensor) -> Tensor:
    cap = model.head.softcap
    assert cap is not None
    return torch.tanh(hidden @ model.head.weight.T / cap) * cap


def sight(slots: Tensor, known: Tensor) -> Tensor:
    """What the loop shows: everything of the row that stands at `known` slots or in this call."""
    own = torch.zeros(len(slots), SLOTS + 1, dtype=torch.bool).scatter_(1, slots, True)[:, :SLOTS]
    return (own | known)[:, None].expand(-1, slots.shape[1], -1)


def test_two_canvases_of_ragged_rows(module: DiffusionGemmaForBlockDiffusion) -> None:
    """Prompts longer than the local layers' window, three steps a canvas, the second canvas after the first."""
    model = wrapped(module)
    lengths = [9, 2, 6]
    stock = [Stock(module) for _ in lengths]
    store = model.key_store(3, SLOTS)
    prompts = random_tokens(3, max(lengths), 1)
    order = torch.arange(max(lengths)).expand(3, -1)
    inside = order < torch.tensor(lengths)[:, None]
    known = torch.arange(SLOTS) < torch.tensor(lengths)[:, None]
    slots = torch.where(inside, order, SLOTS)
    model.forward(prompts, order, slots, sight(slots, known), store, clean=True)
    for row, length in enumerate(lengths):
        stock[row].encode(prompts[row : row + 1, :length])
    for canvas in range(2):
        begin = torch.tensor(lengths)[:, None] + canvas * CANVAS
        places = begin + torch.arange(CANVAS)
        conditioning: list[Tensor | None] = [None, None, None]
        tokens = random_tokens(3, CANVAS, 10 + canvas)
        for step in range(3):
            temperature = 1.0 - 0.3 * step
            tokens = random_tokens(3, CANVAS, 100 * canvas + step)
            hidden = model.forward(tokens, places, places, sight(places, known), store)
            logits = logits_of(model, hidden)
            for row in range(3):
                expected = stock[row].denoise(tokens[row : row + 1], conditioning[row])
                assert (logits[row] - expected[0]).abs().max() <= TOLERANCE
                conditioning[row] = expected / temperature
            store.temperature = temperature
        model.forward(tokens, places, places, sight(places, known), store, clean=True)
        known = known | (torch.arange(SLOTS) < begin + CANVAS)
        for row in range(3):
            stock[row].encode(tokens[row : row + 1])


def test_some_rows_go_on_and_others_leave(module: DiffusionGemmaForBlockDiffusion) -> None:
    model = wrapped(module)
    prompts, canvas = random_tokens(3, 6, 2), random_tokens(3, CANVAS, 3)
    order, places = torch.arange(6).expand(3, -1), torch.arange(6, 6 + CANVAS).expand(3, -1)
    known = (torch.arange(SLOTS) < 6).expand(3, -1)

    def two_steps(some: list[int]) -> Tensor:
        store = model.key_store(3, SLOTS)
        model.forward(prompts, order, order, sight(order, known), store, clean=True)
        model.forward(canvas, places, places, sight(places, known), store)
        rows = torch.tensor(some)
        now, at, what = canvas.flip(1)[rows], places[rows], sight(places, known)[rows]
        if len(some) == 1:
            store.keep(rows)
            return model.forward(now, at, at, what, store)
        return model.forward(now, at, at, what, store, rows)

    everything = two_steps([0, 1, 2])
    torch.testing.assert_close(two_steps([2, 0]), everything[[2, 0]], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(two_steps([1]), everything[[1]], rtol=0, atol=TOLERANCE)
    store = model.key_store(3, SLOTS)
    model.forward(prompts, order, order, sight(order, known), store, clean=True)
    cold = model.forward(canvas.flip(1), places, places, sight(places, known), store)
    assert (cold - everything).abs().max() > 1e-2, "the prediction of the step before must matter"


def test_the_row_and_the_refusals(module: DiffusionGemmaForBlockDiffusion) -> None:
    model = wrapped(module)
    assert (model.adapter.name, model.adapter.block_size, model.mask_token_id) == ("diffusion-gemma", CANVAS, None)
    assert model.vocab_size == VOCAB and model.eos_token_ids == (1,) and model.head.softcap == 3.0
    order = torch.arange(CANVAS)[None]
    visible = torch.ones(1, CANVAS, CANVAS, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="reads finished text through a store"):
        model.forward(order, order, order, visible, None)
    store = model.key_store(1, SLOTS)
    seen = sight(order, torch.zeros(1, SLOTS, dtype=torch.bool))
    model.forward(order, order, order, seen, store)
    store.temperature = 0.0
    with pytest.raises(ArgumentError, match="temperature=0.0; use a finite number above 0"):
        model.forward(order, order, order, seen, store)
    # A token's way through a layer is more than through the average alone, and pairs come on top.
    assert model.flops(1, 0) > 4.0 * model.head.weight.numel()
    assert model.flops(2, 3) == pytest.approx(2 * model.flops(1, 0) + 2 * 3 * 4.0 * (4 * 8 + 4 * 8 + 4 * 12))


def test_an_empty_prompt(module: DiffusionGemmaForBlockDiffusion) -> None:
    """The canvas alone: two calls, the second conditioned on the first."""
    model = wrapped(module)
    store = model.key_store(1, SLOTS)
    order = torch.arange(CANVAS)[None]
    nothing = torch.zeros(1, SLOTS, dtype=torch.bool)
    first = model.forward(order, order, order, sight(order, nothing), store)
    again = model.forward(order, order, order, sight(order, nothing), store)
    assert first.isfinite().all() and (first - again).abs().max() > 1e-3


def test_decoded_canvases_are_the_most_likely_tokens(module: DiffusionGemmaForBlockDiffusion) -> None:
    """With one step per canvas: the argmax of the module's own forward on the same noise, canvas after canvas."""
    prompt, seed = [3, 4, 5], 11
    noise = (seeds.uniform(seeds.derive(seed, "canvas"), (3 + 2 * CANVAS,)) * VOCAB).long()[3:]
    stock, expected = Stock(module), []
    stock.encode(torch.tensor([prompt]))
    for canvas in noise[None].split(CANVAS, dim=1):
        likeliest = stock.denoise(canvas, None).argmax(-1)
        stock.encode(likeliest)
        expected += likeliest[0].tolist()
    decoded = decode(
        wrapped(module), [prompt], rule="renoise:max_steps=1", max_new_tokens=2 * CANVAS, seed=[seed], stop_token_ids=[]
    )
    assert decoded.tokens == [expected]
    assert decoded.tallies[0].forwards == {"prefill": 1, "refresh": 0, "denoise": 2, "verify": 0, "store": 1}
    assert decoded.tallies[0].certificate is None


@pytest.mark.parametrize("cache", [None, "none"])
def test_decoded_rows_do_not_depend_on_their_batch(module: DiffusionGemmaForBlockDiffusion, cache: str | None) -> None:
    model, prompts, own = wrapped(module), [[3, 4, 5, 6], [7], [8, 9, 1, 2, 3, 4, 5]], [5, 6, 7]
    options: dict[str, Any] = {"rule": "renoise:max_steps=5,gamma=1", "max_new_tokens": 2 * CANVAS, "cache": cache}
    together = decode(model, prompts, seed=own, **options)
    for prompt, seed, tokens in zip(prompts, own, together.tokens, strict=True):
        assert decode(model, [prompt], seed=[seed], **options).tokens == [tokens]
    with pytest.raises(UnsupportedError, match="EntropyBound does not fit noise of the kind 'uniform'"):
        decode(model, prompts, rule="entropy-bound")
    with pytest.raises(UnsupportedError, match="canvases of 4 tokens"):
        decode(model, prompts, block_size=2)


def test_logits_that_are_no_numbers_end_a_canvas(module: DiffusionGemmaForBlockDiffusion) -> None:
    model = wrapped(copy.deepcopy(module))
    model.head.weight[3] = torch.nan
    decoded = decode(model, [[4, 5]], rule="renoise:max_steps=3", max_new_tokens=CANVAS)
    assert decoded.tokens == [[]]
    assert decoded.stopped[0].startswith("no token for position 2 of row 0")
