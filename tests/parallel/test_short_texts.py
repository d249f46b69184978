"""A text with fewer tokens than ranks is given to some of them, in every exchange; so is a video of a token a rank."""

from __future__ import annotations

import functools
import itertools

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import short_text_worker as worker
from tests.parallel.equivalence_worker import KINDS

#: Texts beside the picture, before and after it, behind masks, and gathered at the end. The layers of
#: HunyuanVideo count the text's tokens from the end, and would take none for all.
NAMES = ("Flux", "HunyuanVideo", "QwenImage", "SD3", "Mochi", "ConsisID", "CogVideoX rotary")
PRODUCT = [(nproc, *case) for nproc in (2, 3) for case in itertools.product(NAMES, KINDS[1], (1, 2)) if case[2] < nproc]
#: By default each exchange meets one model, and each model one exchange.
FEW = [(3, name, KINDS[1][place % len(KINDS[1])], 1 + place % 2) for place, name in enumerate(NAMES)]
CASES = PRODUCT if covering.FULL else FEW


@functools.cache
def results(nproc: int) -> dict[tuple[str, str, int], list[tuple[float, bool]]]:
    return launch(worker.short_texts, nproc, nproc, [case[1:] for case in CASES if case[0] == nproc])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_short_texts(case: tuple[int, str, str, int]) -> None:
    rows = results(case[0])[case[1:]]
    assert max(error for error, _ in rows) <= 1e-10
    assert all(is_predicted for _, is_predicted in rows)


def test_a_video_of_one_token_a_rank() -> None:
    rows = launch(worker.one_token, 2, 2)
    assert max(error for error, _ in rows) <= 1e-6  # its rotary embedding is in single precision
    assert all(is_predicted for _, is_predicted in rows)
