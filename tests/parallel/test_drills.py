"""A rank that fails is named within seconds where waits return at once, as NCCL's do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from partsong.errors import PartsongError
from partsong.evals.gpu.drills import DRILLS, NAMED, words_of
from partsong.parallel import launch
from tests.parallel.nccl_like import drill


@pytest.mark.full
@pytest.mark.parametrize("how", DRILLS)
@pytest.mark.slow
def test_the_failed_rank_is_named(how: str, tmp_path: Path) -> None:
    file = tmp_path / "failed at"
    with pytest.raises(PartsongError) as raised:
        launch(drill, 2, how, str(file))
    assert time.time() - float(file.read_text()) <= NAMED
    assert words_of(how) in "\n".join((str(raised.value), *getattr(raised.value, "__notes__", ())))
