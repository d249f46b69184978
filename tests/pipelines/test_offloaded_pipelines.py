"""Every pipeline of diffusers makes the very same picture with its blocks' weights in the host's memory."""

from __future__ import annotations

import pytest
from diffusers.utils import logging

from partsong import OffloadWeights, UnsupportedError
from partsong.parallel import parallelize
from partsong.parallel.adapters import adapter_for
from tests import covering
from tests.pipelines.case import denoisers, distance
from tests.pipelines.cases import CASES, FAMILY

#: One of seven families, each with its last pipeline, which has the most on it; all run with ``--full``.
TRIED = list(CASES) if covering.FULL else list({family: name for name, family in FAMILY.items()}.values())[::7]
OFFLOADED = OffloadWeights(resident=0.3, chunk_mb=0.005)


@pytest.mark.parametrize("name", TRIED)
@pytest.mark.slow
def test_makes_the_same_picture(name: str) -> None:
    logging.set_verbosity_error()
    case = CASES[name]
    pipe = case.make()
    models = denoisers(pipe)
    reason = next((why for part in models if (why := OFFLOADED.refuses(adapter_for(part))) is not None), None)
    if reason is not None:
        with pytest.raises(UnsupportedError) as refusal:
            parallelize(pipe, OFFLOADED)
        assert reason in str(refusal.value)
        return
    alone = case.run(pipe)
    with parallelize(pipe, OFFLOADED) as plan:
        assert distance(case.run(pipe), alone) == 0
        assert all(each.shards is not None and each.shards.spared() > 0 for each in plan.denoisers)
    assert distance(case.run(pipe), alone) == 0
    assert all("_apply" not in vars(part) for model in models for part in model.modules())
