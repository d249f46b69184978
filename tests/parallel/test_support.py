"""What the support page refuses is refused, and what it promises is in the matrix."""

from __future__ import annotations

import re

from partsong.parallel import ADAPTERS
from partsong.parallel.ranks.launch import launch
from partsong.samplers.registry import strategies
from partsong.samplers.support import support_rows
from tests.parallel import support_worker
from tests.parallel.equivalence_worker import compared

DENOISING = {name: kind for name, kind in strategies().items() if kind.denoises}


def test_every_promise_is_in_the_matrix() -> None:
    promised = {
        (name, row["model"])
        for row in support_rows()
        for name, kind in DENOISING.items()
        if row.get(kind.__name__, "refused") != "refused"
    }
    tested = compared() | support_worker.TESTED_ELSEWHERE
    assert promised <= tested, sorted(promised - tested)
    assert len(promised) > 0.5 * len(ADAPTERS) * len(DENOISING)


def test_refused_cells_raise_with_their_reason() -> None:
    for (strategy, model), told in launch(support_worker.refusals, 2).items():
        reason = strategies()[strategy]().refuses(ADAPTERS[model])
        assert reason is not None
        assert told == [f"UnsupportedError: {strategies()[strategy].__name__} on {model}: {reason}"] * 2


def test_no_advice_leads_to_another_refusal() -> None:
    kinds = {kind.__name__: kind for kind in DENOISING.values()}
    for adapter in ADAPTERS.values():
        for kind in kinds.values():
            reason = kind().refuses(adapter) or ""
            for word in re.findall(r"\w+", reason.rpartition("; use ")[2]):
                advised = kinds.get(word)
                assert advised is None or advised().refuses(adapter) is None, (kind.__name__, adapter.model, reason)
