"""A model that is no class of diffusers runs with a row of its own, and under what needs no row without one."""

from __future__ import annotations

import functools

import pytest
from diffusers import DiTTransformer2DModel

from partsong import CfgParallel, Ulysses, parallelize
from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import own_model_worker as worker
from tests.parallel.own_models import MODELS, TYPOS, VIDEO, OwnVideo

#: The page's example runs under every strategy, the others take turns; with ``--full`` on three ranks too.
RANKS = (2, 3) if covering.FULL else (2,)
PRODUCT = [
    *((nproc, name, strategy, True) for nproc in RANKS for name in MODELS for strategy in worker.WITH_ROW),
    *((nproc, name, strategy, False) for nproc in RANKS for name in MODELS for strategy in worker.WITHOUT),
]
PAGE = [case for case in PRODUCT if case[1] == "the page's"]
CASES = PRODUCT if covering.FULL else [*PAGE, *covering.covering(PRODUCT, beside=PAGE)]


@functools.cache
def launched(nproc: int) -> dict[tuple[str, str, bool], list[tuple[float, bool]]]:
    return launch(worker.right, nproc, nproc, [case[1:] for case in CASES if case[0] == nproc])


@pytest.mark.parametrize(("nproc", "name", "strategy", "has_row"), CASES)
def test_is_itself_and_sends_what_is_predicted(nproc: int, name: str, strategy: str, has_row: bool) -> None:
    rows = launched(nproc)[name, strategy, has_row]
    assert len(rows) == nproc
    for apart, is_predicted in rows:
        assert apart < 1e-10
        assert is_predicted


@functools.cache
def wrong() -> dict[str, list[str]]:
    return launch(worker.wrong, 2)


def test_a_row_that_misses_something_is_refused_on_all_ranks_alike() -> None:
    for said in wrong()["row"]:
        assert said.startswith("UnsupportedError: the adapter given for Averaging is wrong: its first call differs")
    assert len({*wrong()["row"]}) == 1


def test_what_needs_a_row_asks_for_one() -> None:
    for said in wrong()["no row"]:
        assert said.startswith("UnsupportedError: Ulysses on OwnDiT: it has no row, and none could be inferred: ")
        assert "give parallelize() a row with adapter=; use CfgParallel or DataParallel" in said
    for said in wrong()["tensor"]:
        assert said.startswith("UnsupportedError: TensorParallel on OwnDiT: found no attention or feed-forward layer")


@pytest.mark.parametrize("field", TYPOS)
def test_a_name_that_the_model_does_not_have_is_told_at_once(field: str) -> None:
    model = OwnVideo()
    with pytest.raises(ArgumentError) as told:
        parallelize(model, Ulysses(), adapter=TYPOS[field])
    assert str(told.value).startswith(f"adapter for OwnVideo: {field} names ")
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_row_for_another_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the adapter is for a model='OwnVideo', and this one is DiTTransformer2DM"):
        parallelize(DiTTransformer2DModel(num_layers=1, norm_num_groups=2), CfgParallel(), adapter=VIDEO)
    with pytest.raises(ArgumentTypeError, match=r"is not a row; give a partsong\.parallel\.Adapter"):
        parallelize(OwnVideo(), CfgParallel(), adapter="OwnVideo")  # type: ignore[arg-type]
