"""Pictures in groups: what training sees is what sampling asks, and one token a forward is the chain rule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.samplers.any_order import ASSD, LPD, KeyedJacobi, PictureRule, decode_groups, decode_jacobi, group_sizes
from partsong.samplers.text import decode_any_order
from partsong_zoo.shapes.model import token_ids
from partsong_zoo.tiles.model import build_model, group_logits
from partsong_zoo.tiles.reader import CaptionedTiles

CAPTIONS = ["a red circle", "a small blue square left of a green cross"]


def random_model(**sizes: int) -> Any:
    """A transformer in float64 whose answers depend on all that it sees."""
    torch.manual_seed(0)
    model = build_model(2, 2, **sizes).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(6 if parameter.ndim > 1 else 1)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(grid=4, num_codes=11)


def words(captions: list[str]) -> Tensor:
    ids = token_ids(captions)
    return ids[:, : int((ids != 0).sum(1).max())]


def orders(count: int, length: int, seed: int = 0) -> Tensor:
    return torch.rand(count, length, generator=torch.Generator().manual_seed(seed)).argsort(1)


def one_by_one(model: Any, ids: Tensor, codes: Tensor, order: Tensor, sizes: list[int], mutual: bool = True) -> Tensor:
    """Logits `[B, L, V]` of given tokens, group after group."""
    reader, known, parts = CaptionedTiles(model=model, words=ids).reader(), order[:, :0], []
    with torch.no_grad():
        for places in order.split(sizes, 1):
            parts.append(reader.ask(codes.gather(1, known), known, places, mutual=mutual))
            known = places
    return torch.cat(parts, 1)


@pytest.mark.parametrize("steps", [1, 3, 5, 16])
def test_training_sees_what_sampling_asks(model: Any, steps: int) -> None:
    """One masked forward of training gives the logits that come group after group from kept keys."""
    ids, order, sizes = words(CAPTIONS), orders(2, 16), group_sizes(16, steps)
    codes = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        trained = group_logits(model, ids, codes, order, sizes)
    assert (one_by_one(model, ids, codes, order, sizes) - trained).abs().max() <= 1e-5 * trained.std()
    if 1 < steps < 16:
        apart = one_by_one(model, ids, codes, order, sizes, mutual=False)
        assert (apart - trained).abs().max() > 0.01 * trained.std()


def test_a_question_does_not_see_the_tokens_of_its_own_group(model: Any) -> None:
    ids, order, sizes = words(CAPTIONS), orders(2, 16), [1, 5, 10]
    codes = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(1))
    changed = codes.scatter(1, order[:, 1:6], (codes.gather(1, order[:, 1:6]) + 1) % 11)
    with torch.no_grad():
        logits, others = (group_logits(model, ids, tokens, order, sizes) for tokens in (codes, changed))
    assert torch.equal(logits[:, :6], others[:, :6])
    assert ((logits - others)[:, 6:].abs().amax(-1) > 1e-6).all()


def test_members_of_a_group_have_no_order(model: Any) -> None:
    ids, order, sizes = words(CAPTIONS), orders(2, 16), [2, 6, 8]
    codes = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(1))
    mixed = torch.cat([torch.tensor([1, 0]), 2 + torch.randperm(6), 8 + torch.randperm(8)])
    with torch.no_grad():
        logits = group_logits(model, ids, codes, order, sizes)
        again = group_logits(model, ids, codes, order[:, mixed], sizes)
    assert (again - logits[:, mixed]).abs().max() <= 1e-5 * logits.std()


def test_a_caption_does_not_depend_on_its_padding(model: Any) -> None:
    order, codes = orders(2, 16), torch.zeros(2, 16, dtype=torch.int64)
    together = one_by_one(model, words(CAPTIONS), codes, order, [4, 12])
    alone = one_by_one(model, words(CAPTIONS[:1]), codes[:1], order[:1], [4, 12])
    assert (together[:1] - alone).abs().max() <= 1e-5 * alone.std()


def enumerated(model: Any, ids: Tensor, order: Tensor) -> Tensor:
    """The probability of all 81 pictures of 2 x 2 tokens, by the chain rule with one token a forward."""
    pictures = torch.tensor(list(itertools.product(range(3), repeat=4)))
    ids, order = ids.expand(81, -1), order.expand(81, -1)
    logits = one_by_one(model, ids, pictures, order, [1] * 4)
    return logits.log_softmax(-1).gather(2, pictures.gather(1, order)[..., None]).sum((1, 2)).exp()


def test_groups_of_one_are_the_chain_rule() -> None:
    """On all pictures of 2 x 2 tokens: the probabilities add up, and pictures come as often as they say."""
    model, ids, order, num = random_model(grid=2, num_codes=3), words(CAPTIONS[:1]), torch.tensor([[2, 0, 3, 1]]), 6000
    probs = enumerated(model, ids, order)
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-6)
    asking = CaptionedTiles(model=model, words=ids.expand(num, -1))
    tokens = decode_groups(asking, order.expand(num, -1), [1] * 4)
    drawn = torch.bincount((tokens * torch.tensor([27, 9, 3, 1])).sum(1), minlength=81) / num
    assert float((drawn - probs).abs().sum()) / 2 <= 0.05
    # The control: tokens of one group do not know of each other.
    at_once = decode_groups(asking, order.expand(num, -1), [1, 3])
    drawn = torch.bincount((at_once * torch.tensor([27, 9, 3, 1])).sum(1), minlength=81) / num
    assert float((drawn - probs).abs().sum()) / 2 > 0.08


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_and_windows_change_nothing(model: Any, guidance: float, temperature: float) -> None:
    """Three ways through one model: groups of one, guesses that are checked, and a window that settles."""
    asking, order = CaptionedTiles(model=model, words=words(CAPTIONS * 3), guidance=guidance), orders(6, 16)
    options: dict[str, Any] = {"temperature": temperature, "seed": 5}
    tokens = decode_groups(asking, order, [1] * 16, **options)
    for drafts in (1, 4):
        assert torch.equal(decode_any_order(asking, tokens * 0, order, drafts=drafts, **options).tokens, tokens)
    for window in (1, 5, 16, 40):
        settled = decode_jacobi(asking, order, window=window, **options)
        assert torch.equal(settled.tokens, tokens)
        assert (settled.forwards <= 16).all() and (window > 1 or (settled.forwards == 16).all())
        assert ((settled.rejected >= 0) & (settled.rejected <= settled.drafted)).all()


def test_kept_keys_are_those_of_a_fresh_start(model: Any) -> None:
    """Calls with tokens that stay, change and come to more give what a model without a memory gives."""
    order, draw = orders(2, 16), torch.Generator().manual_seed(2)
    rank, tokens = order.argsort(1), torch.randint(11, (2, 16), generator=draw)
    remembering = CaptionedTiles(model=model, words=words(CAPTIONS), guidance=2.0)
    for first, changed in ((0, None), (3, None), (5, 4), (5, 1), (2, None), (12, 9)):
        if changed is not None:
            place = order[:, changed : changed + 1]
            tokens = tokens.scatter(1, place, (tokens.gather(1, place) + 1) % 11)
        ranks = first + torch.arange(4).expand(2, -1)
        places, seen = order.gather(1, ranks), ranks.clone()
        fresh = CaptionedTiles(model=model, words=words(CAPTIONS), guidance=2.0)
        with torch.no_grad():
            logits, again = (asking(tokens, rank, places, seen) for asking in (fresh, remembering))
        assert (again - logits).abs().max() <= 1e-5 * logits.std()


@pytest.mark.parametrize("rule", [LPD(steps=5), ASSD(drafts=3), KeyedJacobi(window=5), LPD(steps=4, order="random")])
def test_a_rule_comes_to_its_serial_twin(model: Any, rule: PictureRule) -> None:
    asking = CaptionedTiles(model=model, words=words(CAPTIONS))
    decoded, twin = rule.decode(asking, seed=2), rule.serial().decode(asking, seed=2)
    assert twin.forwards.tolist() == [16, 16]
    assert (decoded.forwards < 16).all()
    assert torch.equal(decoded.tokens, twin.tokens) == (rule.kind == "exact")
    assert torch.equal(LPD(steps=16).decode(asking, seed=2).tokens, LPD(steps=None).decode(asking, seed=2).tokens)


def test_refused(model: Any) -> None:
    asking = CaptionedTiles(model=model, words=words(CAPTIONS))
    with pytest.raises(ArgumentError, match="17 steps for 16 tokens; use 1 to 16"):
        LPD(steps=17).decode(asking)
    with pytest.raises(ArgumentError, match="do not divide an order of 16"):
        decode_groups(asking, orders(2, 16), [1, 2])
    with pytest.raises(ArgumentError, match="every place of its row once"):
        decode_groups(asking, torch.zeros(2, 16, dtype=torch.int64), [16])
    with pytest.raises(ArgumentError, match="window=0; use a positive integer"):
        decode_jacobi(asking, orders(2, 16), window=0)
    with pytest.raises(ArgumentError, match="use apart, random or raster"):
        LPD(order="spiral").validate()  # pyright: ignore[reportArgumentType]
