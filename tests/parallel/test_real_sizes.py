"""Every row at its published model's real size: `predict` makes the calls, and a formula counts the bytes anew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from partsong import CfgParallel, DataParallel, DisplacedPatch, Ring, SyncPatch, Ulysses
from partsong.errors import UnsupportedError
from partsong.parallel import ADAPTERS, Strategy, predict
from tests import covering
from tests.parallel.real_size import RealSize, real
from tests.parallel.real_size_bytes import expected
from tests.parallel.real_sizes_frames import OTHERS
from tests.parallel.real_sizes_images import CROSS, JOINT
from tests.parallel.real_sizes_pairs import PAIRS
from tests.parallel.real_sizes_sequences import SEQUENCES
from tests.parallel.real_sizes_sounds import SOUNDS
from tests.parallel.real_sizes_uncut import UNCUT
from tests.parallel.real_sizes_unets import ROWS
from tests.parallel.real_sizes_video_unets import VIDEO_UNETS
from tests.parallel.real_sizes_videos import HUNYUAN, WAN

TABLES = (CROSS, JOINT, PAIRS, SEQUENCES, WAN, HUNYUAN, OTHERS, SOUNDS, ROWS, VIDEO_UNETS, UNCUT)
SIZES = {size.model: size for table in TABLES for size in table}

#: Name -> the strategies, ranks, and samples of a call.
PLANS: dict[str, tuple[tuple[Strategy, ...], int, int]] = {
    "ulysses": ((Ulysses(),), 8, 1),
    "ring": ((Ring(),), 8, 1),
    "sync-patch": ((SyncPatch(),), 8, 1),
    "displaced-patch": ((DisplacedPatch(),), 8, 1),
    "cfg-parallel": ((CfgParallel(),), 8, 2),
    "data-parallel": ((DataParallel(),), 8, 10),
    "ring x ulysses": ((Ulysses(degree=8), Ring(degree=8)), 64, 1),
}


def fits(size: RealSize, strategies: Sequence[Strategy], ranks: int) -> bool:
    """Whether the strategies have a form on a model, whose rows or frames are enough for the ranks."""
    if any(strategy.refuses(ADAPTERS[size.model]) for strategy in strategies):
        return False
    if strategies[0].axes[0] in ("cfg", "data"):
        return size.batches
    return size.grid is None or size.grid // size.step >= ranks


CASES = [
    (name, plan)
    for name, size in SIZES.items()
    for plan, (strategies, ranks, _) in PLANS.items()
    if fits(size, strategies, ranks)
]


def rotated() -> list[tuple[str, str]]:
    """Every fifth model once, its turn deciding under which of its plans; what takes longest is left out.

    These are plans of 64 ranks, and `DisplacedPatch`, whose warm-up makes a prediction of several calls. A model takes
    a second, and the bytes of its small twin are counted elsewhere.
    """
    quick = [plan for plan, (_, ranks, _) in PLANS.items() if ranks == 8 and plan != "displaced-patch"]
    plans = {name: [plan for model, plan in CASES if model == name and plan in quick] for name in SIZES}
    return [(name, own[turn // 5 % len(own)]) for turn, (name, own) in enumerate(plans.items()) if turn % 5 == 3]


def test_every_row_has_a_real_size() -> None:
    assert set(SIZES) == {adapter.model for adapter in ADAPTERS.values() if not adapter.mixes}


@pytest.mark.parametrize(("name", "plan"), CASES if covering.FULL else rotated())
def test_bytes_of_a_real_size_are_those_of_the_formula(name: str, plan: str) -> None:
    size, (strategies, ranks, batch) = SIZES[name], PLANS[plan]
    if size.values is not None:
        with pytest.raises(UnsupportedError, match="takes more than shapes"):
            predict(size.build(), *strategies, ranks=ranks, **size.inputs(batch))
        return
    told = predict(size.build(), *strategies, ranks=ranks, **size.inputs(batch))
    assert told.bytes_per_step == expected(size, strategies, ranks, batch)


def test_fewer_runs_of_rows_than_ranks_are_refused() -> None:
    # 256 x 256 pixels, as ali-vilab/text-to-video-ms-1.7b makes them, are four rows at the coarsest level.
    size = SIZES["UNet3DConditionModel"]
    small = size.inputs(1) | {"sample": real(1, 4, 16, 32, 32)}
    with pytest.raises(UnsupportedError, match="4 rows, too few to cut over 8 ranks"):
        predict(size.build(), SyncPatch(), ranks=8, **small)
