"""Covering arrays hold every two values that can meet, in few cases, the same ones in every run."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.covering import covering
from tests.parallel import (
    test_clip_parallel,
    test_equivalence,
    test_image_pipelines,
    test_parallel_vae,
    test_pipelines,
    test_unet,
)

#: Names of products -> all possible cases, and those that run.
ARRAYS: dict[str, tuple[list[Any], list[Any]]] = {
    "equivalence": (test_equivalence.PRODUCT, test_equivalence.CASES),
    "clips": (test_clip_parallel.PRODUCT, test_clip_parallel.CASES),
    "pipelines of clips": (test_clip_parallel.PIPE_PRODUCT, test_clip_parallel.PIPE_CASES),
    "autoencoders": (test_parallel_vae.PRODUCT, test_parallel_vae.CASES),
    "residuals": (test_image_pipelines.PRODUCT, test_image_pipelines.CASES),
    "UNets": (test_unet.PRODUCT, test_unet.CASES),
    "pipelines of UNets": (test_unet.PIPE_PRODUCT, test_unet.PIPE_CASES),
    "pipelines": (test_pipelines.PRODUCT, test_pipelines.KEYS),
}


def meet(cases: list[Any]) -> set[tuple[Any, ...]]:
    """Every two values of different factors that are in one case."""
    factors = range(len(cases[0]))
    return {(i, case[i], j, case[j]) for case in cases for i in factors for j in factors if i < j}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_two_values_that_can_meet_do_meet(name: str) -> None:
    product, cases = ARRAYS[name]
    assert len(cases) == len(set(cases)) and set(cases) <= set(product)
    assert meet(cases) == meet(product)


def legal(case: tuple[int, ...]) -> bool:
    return case[0] != case[1] and sum(case) % 7 != 0


PRODUCT = [case for case in itertools.product(range(9), range(7), range(3), range(2)) if legal(case)]


def test_an_array_is_hardly_longer_than_its_two_longest_factors_need() -> None:
    cases = covering(PRODUCT)
    assert meet(cases) == meet(PRODUCT)
    assert len({case[:2] for case in PRODUCT}) <= len(cases) <= 1.2 * 9 * 7


def test_what_is_preferred_is_taken_unless_a_pair_needs_another() -> None:
    cases = covering(PRODUCT, prefer=lambda case: case[3])
    assert meet(cases) == meet(PRODUCT)
    assert sum(case[3] for case in cases) < len(cases) / 3


def test_what_meets_beside_needs_no_case() -> None:
    beside = [case for case in PRODUCT if case[0] != 4]
    cases = covering(PRODUCT, beside=beside)
    assert cases and all(case[0] == 4 for case in cases)
    assert meet(cases + beside) == meet(PRODUCT)
    assert covering(beside, beside=beside) == []


WORDS = ("abcdef", "ghijk", "lm", "no")


def test_the_cases_are_the_same_in_every_run() -> None:
    code = f"import itertools; from tests.covering import covering; print(covering(itertools.product(*{WORDS})))"
    command, root = [sys.executable, "-c", code], Path(__file__).parents[1]
    for seed in ("1", "2"):
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={"PYTHONHASHSEED": seed})
        assert done.stdout == f"{covering(itertools.product(*WORDS))}\n"
