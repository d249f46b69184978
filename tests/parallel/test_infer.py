"""A model without a row gets one that is checked: plain ones run, ones that only look plain are refused."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import infer_worker


@functools.cache
def right(nproc: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(infer_worker.right, nproc, nproc, [(label, name) for ranks, label, name in CASES if ranks == nproc])


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[str]]:
    return launch(infer_worker.wrong, 2)


#: By default three ranks, whose parts are uneven, have one model.
CASES = [
    (nproc, label, name)
    for nproc, label, name in itertools.product((2, 3), infer_worker.STRATEGIES, infer_worker.MODELS)
    if covering.FULL or nproc == 2 or (label, name) == ("Ulysses", "Plain")
]


@pytest.mark.parametrize(("nproc", "strategy", "name"), CASES)
def test_a_plain_model_is_exact_and_told_of_once(nproc: int, strategy: str, name: str) -> None:
    rows, splits_batch = right(nproc)[strategy, name], strategy in ("DataParallel", "ShardedWeights")
    for rank, row in enumerate(rows):
        # LTX turns positions in float32, and a batch of one rounds otherwise than a row of two.
        assert row["error"] <= (1e-6 if splits_batch and name == "LTX" else 1e-10)
        assert row["sent"] == row["predicted"] > 0
        assert len(row["told"]) == (rank == 0)
        assert all("inferred" in message for message in row["told"])


REFUSED = {
    "Centred": "the one inferred from its structure is wrong: its first call differs from one rank's by",
    "Rolled": "is wrong: a layer cannot compute with a part of the tokens (RuntimeError); use CfgParallel",
    "NoProjection": "none could be inferred: no linear layer follows its blocks",
    "Linear": "none could be inferred: its forward takes input, and none of hidden_states",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_looks_plain_is_refused_on_all_ranks_alike(wrong: dict[str, list[str]], name: str) -> None:
    for said in wrong[name]:
        assert said.startswith("UnsupportedError")
        assert REFUSED[name] in said
    assert wrong[name][0] == wrong[name][1]
