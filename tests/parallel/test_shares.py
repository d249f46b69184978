"""Uneven ranks: cuts by their shares equal one rank, move what is predicted, and give a slow rank less."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from partsong import CfgParallel, Ring, Ulysses, predict
from partsong.errors import ArgumentError
from partsong.parallel import AXES
from partsong.parallel.ranks.axes import shares_along
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.shards import split_sizes
from tests import covering
from tests.covering import chosen
from tests.parallel import shares_worker
from tests.parallel.families import FAMILIES
from tests.parallel.shares_worker import FOUR, MODELS, SHARES, SINGLE, Case, has_form

#: The kinds of models that the default run takes: a UNet, a transformer of one stream, and one of joint attention.
USUAL = ("DiT", "Flux", "SD")
PRODUCT: list[Case] = [
    (nproc, strategy, model)
    for nproc, strategies in ((2, SINGLE), (3, SINGLE), (4, FOUR))
    for strategy in strategies
    for model in MODELS
    if has_form(strategy, model)
]


def is_usual(case: Case) -> bool:
    """Whether the default run takes a case."""
    nproc, strategy, model = case
    if (strategy, model) == ("DynamicSequence", "Latte"):
        return nproc == 2
    if nproc == 3:
        return strategy in ("Ulysses", "SyncPatch") and model == "DiT"
    return nproc == 2 and model in USUAL and model != USUAL[SINGLE.index(strategy) % len(USUAL)]


#: Of the usual cases, few in which every two values meet; what is cut on two ranks costs least.
CASES = PRODUCT if covering.FULL else chosen(filter(is_usual, PRODUCT), prefer=lambda case: case[0])


@functools.cache
def results(nproc: int) -> dict[Case, dict[str, Any]]:
    """One launch for all cases of a number of ranks."""
    return launch(shares_worker.matrix, nproc, nproc, [case for case in CASES if case[0] == nproc])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_one_rank_and_moves_what_is_predicted(case: Case) -> None:
    got = results(case[0])[case]
    assert got["error"] <= 1e-10
    assert got["counted"] == got["predicted"]
    assert any(len(set(sizes)) > 1 for sizes in got["sizes"].values())
    assert any("by shares" in line for line in got["split"])


def test_a_rank_with_the_largest_share_holds_most() -> None:
    for case in CASES:
        if case[0] < 4:
            shares = SHARES[case[0]]
            for sizes in results(case[0])[case]["sizes"].values():
                assert max(sizes) == sizes[shares.index(max(shares))]


def test_an_autoencoder_is_cut_by_shares() -> None:
    for got in launch(shares_worker.autoencoders, 2, 2).values():
        assert got["error"] <= 1e-10
        assert got["counted"] == got["told"]
        assert all("by shares 1 : 2.5" in line for line in got["split"])


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_no_other_cut_is_done_sooner() -> None:
    speeds = (0.1, 1.0, 1.5, 7.0)
    for shares in [*itertools.product(speeds, repeat=2), *itertools.product(speeds, repeat=3)]:
        for total, least in itertools.product(range(12), (0, 1, 2)):
            got = split_sizes(total, len(shares), shares, least)
            fewest = min(least, total // len(shares))
            cuts = [cut for cut in itertools.product(range(total + 1), repeat=len(shares)) if sum(cut) == total]
            legal = [cut for cut in cuts if min(cut) >= fewest]
            assert got in legal
            longest = [max(size / share for size, share in zip(cut, shares, strict=True)) for cut in (got, *legal)]
            assert longest[0] <= min(longest) + 1e-12


@pytest.mark.parametrize(("total", "parts"), [(0, 1), (7, 3), (2, 4), (12, 4)])
def test_equal_shares_cut_as_without(total: int, parts: int) -> None:
    assert split_sizes(total, parts, (0.3,) * parts) == split_sizes(total, parts)


def test_shares_along_axes() -> None:
    degrees = dict.fromkeys(AXES, 1) | {"cfg": 2, "ring": 2, "ulysses": 2}
    shares = (4.0, 2.0, 3.0, 1.0, 5.0, 1.0, 2.0, 2.0)
    assert shares_along(("ring", "ulysses"), degrees, shares) == (4.0, 1.0, 2.0, 1.0)  # the slower of both branches
    assert shares_along(("ulysses",), degrees, shares) == (6.0, 2.0)  # the sum of the ring
    assert shares_along(("ring",), degrees, shares) == (5.0, 3.0)
    assert shares_along((), degrees, shares) is None
    assert shares_along(("ring",), degrees, None) is None


# --- predictions and refusals ----------------------------------------------------------------------------------------


def test_predict_knows_shares_of_ranks_that_need_not_exist() -> None:
    model, named = FAMILIES["DiT"].model(8, torch.float32), FAMILIES["DiT"].call(8, 1, torch.float32)
    told = predict(model, Ring(), ranks=64 // 8, shares=(9, *(1,) * 7), **named)
    sent = told.bytes_per_step
    assert sent[0] > sent[1]
    assert "by shares 9 : 1" in told.split[0]
    with pytest.raises(ArgumentError, match=r"shares=\(2, 2, 1, 1\) change nothing: only ulysses is cut unevenly"):
        predict(model, CfgParallel(), Ulysses(), ranks=4, shares=(2, 2, 1, 1), **named)


@functools.cache
def refusals() -> list[dict[str, str]]:
    return launch(shares_worker.refusals, 2, 2)


@pytest.mark.parametrize(
    ("trial", "words"),
    [
        ("too few", ("1 given", "2 ranks")),
        ("zero", ("above 0",)),
        ("not numbers", ("'21'", "above 0")),
        ("other on every rank", ("rank 1 was given shares=(2.0, 9.0), rank 0 shares=(1.0, 9.0)",)),
        ("no use", ("shares=(1, 2.5) change nothing", "CfgParallel makes equal parts only")),
        ("idle", ("takes no time",)),
        ("no rounds", ("repeats=0", "positive integer")),
        ("alike", ("Output",)),
    ],
)
def test_refused_alike_on_every_rank(trial: str, words: tuple[str, ...]) -> None:
    texts = {told[trial] for told in refusals()}
    assert len(texts) == 1
    assert all(word in next(iter(texts)) for word in words)


# --- measured --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_slowed_rank_is_given_less_and_has_less_to_do() -> None:
    seen = launch(shares_worker.slowed, 2, 2, 4)
    fast, slow = seen
    assert fast["shares"] == slow["shares"], "all ranks must know the same shares"
    assert fast["shares"][0] == 1.0
    assert 0.05 < fast["shares"][1] < 0.9
    assert fast["tokens"]["even"] == (128, 128)
    assert slow["tokens"]["by shares"][1] < 122
    assert slow["busy"]["by shares"] < 0.97 * slow["busy"]["even"]
    assert max(fast["error"], slow["error"]) < 5e-6
