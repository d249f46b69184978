"""Meshes: axes and their ranks, degrees that fit or are refused with their numbers, and how strategies share ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partsong import CfgParallel, DataParallel, DisplacedPatch, Ring, Ulysses, Usp, parse_strategy
from partsong.errors import ArgumentError, PartsongError, UnsupportedError
from partsong.parallel import AXES, Mesh, Strategy, mesh_for
from partsong.parallel.ranks.launch import launch
from partsong.samplers.registry import strategies
from tests.documents import ROOT
from tests.parallel import mesh_worker


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(mesh_worker.run, 4, 4)


AXIS_RANKS = {
    "cfg": [((0, 2), 0), ((1, 3), 0), ((0, 2), 1), ((1, 3), 1)],
    "ulysses": [((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)],
    "both": [((0, 1, 2, 3), rank) for rank in range(4)],
    "swapped": [((0, 1, 2, 3), rank) for rank in range(4)],
    "data": [((0, 2), 0), ((1, 3), 0), ((0, 2), 1), ((1, 3), 1)],
    "reopened ring": [((0, 1), 0), ((0, 1), 1), ((2, 3), 0), ((2, 3), 1)],
    "patch": [((0, 1, 2, 3), rank) for rank in range(4)],
    "ring": [((rank,), None) for rank in range(4)],
    "names": [("cfg", "ulysses")] * 4,
    "same object": [True] * 4,
    "main": [True, False, False, False],
    "closed": [True] * 4,
    "plan's own mesh": [(True, True, "Mesh(ulysses=4")] * 4,
    "degrees of the mesh": [True] * 4,
}


@pytest.mark.parametrize("name", AXIS_RANKS)
@pytest.mark.slow
def test_what_every_rank_sees(ranks: list[dict[str, Any]], name: str) -> None:
    assert [seen[name] for seen in ranks] == AXIS_RANKS[name]


def test_degrees_that_do_not_fit_are_refused_on_every_rank_with_the_numbers(ranks: list[dict[str, Any]]) -> None:
    texts = {seen["refused"] for seen in ranks}
    assert len(texts) == 1
    text = texts.pop()
    assert "ulysses=3" in text
    assert "multiply to 3" in text
    assert "4 ranks" in text


def test_a_plain_process_is_a_mesh_of_one_rank() -> None:
    for _ in range(2):
        with Mesh() as mesh:
            assert (mesh.rank, mesh.world_size, mesh.is_main, mesh.device_mesh) == (0, 1, True, None)
            for names in [*((name,) for name in AXES), AXES]:
                assert (mesh.axis(*names).ranks, mesh.axis(*names).index, mesh.axis(*names).group) == ((0,), 0, None)


def test_a_mesh_takes_the_device_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTSONG_DEVICE", "meta")
    assert (Mesh().device.type, Mesh(device="cpu").device.type) == ("meta", "cpu")


def test_unknown_axis_is_named() -> None:
    with Mesh() as mesh, pytest.raises(ArgumentError, match="'rings'.*ulysses"):
        mesh.axis("rings")


@pytest.mark.parametrize("degree", [0, -2, True, 2.0, "2", None])
def test_a_degree_is_a_positive_integer(degree: Any) -> None:
    with pytest.raises(ArgumentError, match=r"ring=.*positive integer"):
        Mesh(ring=degree)


def test_printing_happens_on_rank_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with Mesh() as mesh:
        mesh.print("heard", 1)
        mesh.rank = 1
        mesh.print("not heard")
    assert capsys.readouterr().out == "heard 1\n"


SHARED: list[tuple[list[Strategy], int, dict[str, int]]] = [
    ([], 1, {}),
    ([Ulysses()], 3, {"ulysses": 3}),
    ([Ring(degree=2), Ulysses()], 4, {"ring": 2, "ulysses": 2}),
    ([CfgParallel()], 3, {"cfg": 3}),
    ([CfgParallel(), Ulysses()], 4, {"cfg": 2, "ulysses": 2}),
    ([Ulysses(), CfgParallel()], 8, {"cfg": 2, "ulysses": 4}),
    ([CfgParallel(), Ulysses()], 3, {"ulysses": 3}),
    ([CfgParallel(), Usp()], 8, {"cfg": 2, "ring": 2, "ulysses": 2}),
    ([Usp()], 4, {"ring": 2, "ulysses": 2}),
    ([Usp()], 6, {"ulysses": 6}),
    ([Usp(ulysses_degree=2)], 6, {"ring": 3, "ulysses": 2}),
    ([Usp(ring_degree=3)], 6, {"ring": 3, "ulysses": 2}),
    ([DataParallel(degree=2), DisplacedPatch()], 6, {"data": 2, "patch": 3}),
]


@pytest.mark.parametrize(("chosen", "world", "want"), SHARED)
def test_strategies_share_the_ranks(chosen: list[Strategy], world: int, want: dict[str, int]) -> None:
    degrees = mesh_for(chosen, world)
    assert tuple(degrees) == AXES
    assert {name: degree for name, degree in degrees.items() if degree > 1} == want


UNSHARED: list[tuple[list[Any], int, type[PartsongError], str]] = [
    ([], 2, ArgumentError, "multiply to 1.*2 ranks"),
    ([Ulysses(degree=2)], 3, ArgumentError, "ulysses=2.*multiply to 2.*3 ranks"),
    ([Ring(degree=2), Ulysses()], 3, ArgumentError, "3 ranks"),
    ([Ring(), Ulysses()], 4, ArgumentError, "Ring and Ulysses leave their degree open"),
    ([Ulysses(), Usp()], 4, UnsupportedError, "Usp and Ulysses both use the mesh axis 'ulysses'"),
    ([Ulysses(degree=0)], 1, ArgumentError, "Ulysses: degree=0; use a positive integer, or None"),
    ([Ulysses(degree=True)], 1, ArgumentError, "Ulysses"),
    ([DisplacedPatch(warmup_steps=0)], 1, ArgumentError, "warmup_steps=0"),
    ([Ulysses(waves=0)], 1, ArgumentError, "waves=0; use a positive integer"),
    (["ulysses"], 1, ArgumentError, r"'ulysses'.*Ulysses\(\)"),
]


@pytest.mark.parametrize(("chosen", "world", "kind", "text"), UNSHARED)
def test_what_cannot_be_shared_is_refused(chosen: list[Any], world: int, kind: type[PartsongError], text: str) -> None:
    with pytest.raises(kind, match=text):
        mesh_for(chosen, world)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("ulysses", Ulysses()),
        ("ring:degree=3", Ring(degree=3)),
        ("usp:ulysses_degree=2,ring_degree=4", Usp(ulysses_degree=2, ring_degree=4)),
        ("cfg-parallel:", CfgParallel()),
    ],
)
def test_a_strategy_is_read_from_text(text: str, want: Strategy) -> None:
    assert parse_strategy(text) == want


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ", ".join(strategies())),
        ("Ulyses", "no strategy 'Ulyses'.*did you mean ulysses"),
        ("ulysses:steps=2", "no option 'steps'.*degree"),
        ("ulysses:kind=exact", "no option 'kind'; its options are degree, waves, wire$"),
        ("sharded-weights:has_loop=1", "no option 'has_loop'; its options are none$"),
        ("ulysses:degree", "degree='' is not a whole number"),
        ("ulysses:degree=two", "degree='two' is not a whole number"),
        ("ulysses:degree=1.5", "'1.5'"),
        ("ulysses:degree=0", "use a positive integer"),
        ("displaced-patch:warmup_steps=0", "warmup_steps=0"),
        ("ulysses:degree=2,degree=3", "twice"),
    ],
)
def test_text_that_is_no_strategy_is_refused(text: str, found: str) -> None:
    with pytest.raises(ArgumentError, match=found):
        parse_strategy(text)


SCRIPT = """
from partsong import Mesh

def begin():
    with Mesh(ring=2):
        raise KeyError("the user's own")

begin()
"""


@pytest.mark.parametrize(
    ("started", "last", "alone"),
    [
        ({}, "draw.py, line 4: the mesh degrees (ring=2) multiply to 2, but this script has one rank; start it with "
         "torchrun --nproc-per-node 2 draw.py, or choose degrees whose product is 1", True),
        ({"RANK": "1", "WORLD_SIZE": "3"}, "[rank1]: draw.py, line 4: the mesh degrees (ring=2) multiply to 2, but "
         "there are 3 ranks; start 2 ranks or choose degrees whose product is 3", True),
        ({"PARTSONG_DEBUG": "1"}, "partsong.errors.ArgumentError: the mesh degrees (ring=2) multiply to 2, but this "
         "script has one rank; start it with torchrun --nproc-per-node 2 draw.py, or choose degrees whose product is 1",
         False),
    ],
)  # fmt: skip
def test_an_error_of_ours_ends_a_script_in_one_line(
    tmp_path: Path, started: dict[str, str], last: str, alone: bool
) -> None:
    (tmp_path / "draw.py").write_text(SCRIPT.lstrip())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **started}
    ran = subprocess.run(
        [sys.executable, "draw.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    said = ran.stderr.strip().splitlines()
    assert ran.returncode == 1 and said[-1] == last and (len(said) == 1) == alone
