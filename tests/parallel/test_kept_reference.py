"""A model that attends to keys of an earlier call: samples and weights over ranks give the videos of one process."""

from __future__ import annotations

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import kept_reference_worker as worker


@pytest.mark.full
def test_equals_one_process_or_is_refused() -> None:
    found = launch(worker.compared, 2)
    for name in worker.STRATEGIES:
        assert max(found[name]) < 1e-5, name
    assert all("WanAnimate2Transformer3DModel: each frame attends to one" in text for text in found["refused"])
