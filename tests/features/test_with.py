"""What docs/with.md promises runs and equals its serial twin, and what it refuses is refused, on all ranks alike."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.features import features_worker as worker
from tests.features import wrong_worker
from tests.features.expected import REASONS, REFUSED, REFUSED_AFTER
from tests.features.features import FEATURES
from tests.features.features_worker import Cell, Outcome
from tests.features.groups import GROUPS

PRODUCT: list[Cell] = [
    (feature.name, group, when) for feature in FEATURES.values() for group in GROUPS for when in feature.orders
]
#: Features that share a launch under ``--full``.
TOGETHER = 4
#: Guidance of three branches has a rank for each.
ON_THREE: list[Cell] = [(name, "CfgParallel", "before") for name in FEATURES if name.startswith("three branches")]


def expected(cell: Cell) -> str | None:
    """Words of the reason why a cell is refused; None where it has to run."""
    key = REFUSED.get(cell[0], {}).get(cell[1])
    key = REFUSED_AFTER.get(cell[0], {}).get(cell[1]) if key is None and cell[2] == "after" else key
    return None if key is None else REASONS[key]


def _few() -> list[Cell]:
    """Each usual feature once where it runs, with the group that has been taken least, and each reason once."""
    taken: list[Cell] = []
    used: Counter[str] = Counter()
    for number, feature in enumerate(each for each in FEATURES.values() if each.usual):
        running = [group for group in GROUPS if group not in REFUSED.get(feature.name, {})]
        if running:
            group = min(running, key=lambda each: used[each])
            used[group] += 1
            taken.append((feature.name, group, feature.orders[number % len(feature.orders)]))
    reasons = {REFUSED.get(name, {}).get(group): (name, group, when) for name, group, when in reversed(PRODUCT)}
    return [*taken, *(cell for key, cell in reasons.items() if key is not None)]


TRIED = PRODUCT if covering.FULL else _few()
#: Features that some cell runs with, so that there is a twin.
SEEN = [name for name in FEATURES if any(cell[0] == name and expected(cell) is None for cell in TRIED)]
ALL_CELLS: list[Cell] = [*TRIED, *((name, worker.ALONE, "") for name in SEEN)]


@functools.cache
def _launched(chunk: int) -> dict[Cell, list[Outcome]]:
    size = TOGETHER if covering.FULL else len(FEATURES)
    names = list(FEATURES)[chunk * size :][:size]
    return launch(worker.outcomes, 2, 2, [cell for cell in ALL_CELLS if cell[0] in names])


def outcomes(cell: Cell) -> list[Outcome]:
    place = list(FEATURES).index(cell[0])
    return _launched(place // TOGETHER if covering.FULL else 0)[cell]


@functools.cache
def on_three() -> dict[Cell, list[Outcome]]:
    return launch(worker.outcomes, 3, 3, ON_THREE)


def check(cell: Cell, rows: list[Outcome]) -> None:
    words = expected(cell)
    for row in rows:
        assert row.kind == ("ran" if words is None else "refused"), row.text
        assert words is None or words in row.text
        assert row.steps == 0, f"refused after {row.steps} calls of the denoiser"
        assert max(row.errors, default=0.0) <= 1e-9
        assert row.sent == row.predicted
    assert len({row.text for row in rows}) == 1


def test_the_table_is_whole() -> None:
    assert len(FEATURES) >= 18
    assert len(GROUPS) >= 8
    assert REFUSED.keys() <= FEATURES.keys()
    assert {group for groups in REFUSED.values() for group in groups} <= GROUPS.keys()
    assert {key for groups in REFUSED.values() for key in groups.values()} == REASONS.keys()
    assert {name for name, _, _ in TRIED} >= {feature.name for feature in FEATURES.values() if feature.usual}
    assert {group for _, group, _ in TRIED} == GROUPS.keys()


@pytest.mark.parametrize("cell", TRIED, ids=", ".join)
def test_is_the_serial_twin_or_refused(cell: Cell) -> None:
    check(cell, outcomes(cell))


@pytest.mark.parametrize("name", SEEN)
def test_the_feature_changes_the_picture(name: str) -> None:
    alone = outcomes((name, worker.ALONE, ""))[0]
    assert alone.kind == "ran", alone.text
    assert (alone.errors[0] > 1e-6) == FEATURES[name].shows


@pytest.mark.full
@pytest.mark.parametrize("cell", ON_THREE, ids=", ".join)
def test_three_branches_have_three_ranks(cell: Cell) -> None:
    rows = on_three()[cell]
    assert len(rows) == 3
    check(cell, rows)


@functools.cache
def wrong() -> dict[str, list[str]]:
    return launch(wrong_worker.everything, 2)


def test_adapters_of_another_model_are_one_error() -> None:
    for said in wrong()["another width"]:
        assert said.startswith("UnsupportedError: load_lora_weights() on StableDiffusion3Pipeline: size mismatch for ")
        assert said.endswith("is the adapter one for another model?")
        assert "\n" not in said
    for said in wrong()["another kind"]:
        assert said.startswith("UnsupportedError: load_lora_weights() has changed no layer of this StableDiffusion3")
    assert wrong()["the plan afterwards"] == ["as before"] * 2


def test_ranks_with_other_adapters_are_told() -> None:
    for how in ("another file", "another weight", "none"):
        for said in wrong()[how]:
            assert said.startswith(
                "UnsupportedError: rank 1 has other adapters on its SD3Transformer2DModel than rank 0"
            )


def test_layers_changed_past_the_methods_are_noticed() -> None:
    for said in wrong()["peft's own function"]:
        assert "the layers of SD3Transformer2DModel have changed since parallelize()" in said
