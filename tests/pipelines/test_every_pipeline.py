"""Every pipeline of diffusers under every strategy gives the serial result on every rank, or is refused at once."""

from __future__ import annotations

import functools
import itertools

import diffusers
import pytest

from partsong.parallel.adapters import adapter_for
from partsong.parallel.ranks.launch import launch
from tests.covering import chosen
from tests.pipelines import worker
from tests.pipelines.case import denoisers
from tests.pipelines.cases import CASES, LEFT_OUT
from tests.pipelines.worker import Outcome

PRODUCT = list(itertools.product((2, 3), CASES, worker.STRATEGIES))
TRIED = chosen(PRODUCT)


@functools.cache
def outcomes(nproc: int) -> dict[worker.Pair, list[Outcome]]:
    return launch(worker.outcomes, nproc, nproc, [(name, strategy) for n, name, strategy in TRIED if n == nproc])


def test_every_pipeline_has_a_case_or_a_reason() -> None:
    public = {name for name in dir(diffusers) if name.endswith("Pipeline")}
    tried = {case.pipeline for case in CASES.values()}
    assert not tried & LEFT_OUT.keys()
    assert public == tried | LEFT_OUT.keys()


@pytest.mark.parametrize(("nproc", "name", "strategy"), TRIED)
def test_is_right_or_refused_at_once(nproc: int, name: str, strategy: str) -> None:
    case, rows = CASES[name], outcomes(nproc)[name, strategy]
    reasons = [worker.STRATEGIES[strategy].refuses(adapter_for(part)) for part in denoisers(case.make())]
    expected = case.refused.get(strategy) or next(filter(None, reasons), None)
    assert len(rows) == nproc
    for row in rows:
        assert row.kind == ("ran" if expected is None else "refused"), row.text
        assert row.error <= case.tolerance
        assert row.sent == row.predicted
        assert expected is None or expected in row.text


@pytest.mark.parametrize(("nproc", "name"), dict.fromkeys((nproc, name) for nproc, name, _ in TRIED))
def test_is_itself_again_afterwards(nproc: int, name: str) -> None:
    assert all(row.error == 0 for row in outcomes(nproc)[name, "alone"])
