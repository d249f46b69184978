"""Kernels compiled for GPUs from Ampere to Blackwell without one: tensor cores where there is a product, no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partsong.kernels.backends.gluon_attention import known_gluon
from partsong.kernels.call import missing_triton
from tests import covering
from tests.kernels.aot import ARCHITECTURES, MODULES

ROOT = Path(__file__).parents[2]
#: Shared memory a block may have, in bytes.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024} | dict.fromkeys((86, 89, 120), 99 * 1024)

pytestmark = pytest.mark.skipif(bool(missing_triton()), reason=missing_triton() or "it is there")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.aot", *["--full"] * covering.FULL]
    # One process per half of the modules: the compiler uses one core.
    halves = [subprocess.Popen([*command, *part], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
              for part in (MODULES[:2], MODULES[2:])]  # fmt: skip
    lines = [line for half in halves for line in half.communicate()[0].splitlines()]
    assert [half.returncode for half in halves] == [0, 0]
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture(rows: list[dict[str, Any]]) -> None:
    tried = {row["architecture"] for row in rows}
    assert tried == set(ARCHITECTURES) if covering.FULL else len(tried) > 2
    assert len({row["name"] for row in rows}) >= 8


def test_nothing_spills(rows: list[dict[str, Any]]) -> None:
    bad = [row for row in rows if row["stack"] or row["local"] or row["spills"]]
    assert not bad


def test_products_run_on_tensor_cores(rows: list[dict[str, Any]]) -> None:
    assert not [row for row in rows if row["has_dot"] and not row["tensor_core"]]
    assert any(row["has_dot"] for row in rows)


def test_shared_memory_fits(rows: list[dict[str, Any]]) -> None:
    assert not [row for row in rows if row["shared"] > SHARED[row["architecture"]]]


def test_the_copy_engine_loads_where_it_is_meant_to(rows: list[dict[str, Any]]) -> None:
    tried = {row["architecture"] for row in rows if row["wants_copy_engine"]}
    # Without --full a kernel is compiled for one architecture: there are two where the one in Gluon is known.
    assert tried == {90, 100, 120} if covering.FULL else len(tried) == 1 + known_gluon()[0]
    assert all(bool(row["copy_engine"]) == row["wants_copy_engine"] for row in rows)
    # Two descriptors of 128 bytes, written by each program and overwritten for the next segment.
    assert {row["descriptor_bytes"] for row in rows if row["wants_copy_engine"] and not row["gluon"]} == {256}
    assert {row["descriptor_bytes"] for row in rows if not row["wants_copy_engine"]} == {0}


@pytest.mark.skipif(not known_gluon()[0], reason=known_gluon()[1])
def test_the_hopper_kernel_is_warp_specialised(rows: list[dict[str, Any]]) -> None:
    hopper = [row for row in rows if row["gluon"]]
    assert hopper
    assert all(row["copy_engine"] and row["gives_registers_away"] for row in hopper)
