"""Holds the bounds in pyproject.toml to the sets of versions that the tests run with."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.documents import ROOT
from tests.version_sets import SETS, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TESTED = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["test"], *EXTRAS["reasoning"])]


@pytest.mark.parametrize("file", SETS.values())
def test_every_set_has_allowed_versions_of_all_that_the_tests_need(file: str) -> None:
    versions = pins(file)
    for needed in TESTED:
        if needed.name != "partsong":
            assert needed.specifier.contains(versions[canonicalize_name(needed.name)]), needed


@pytest.mark.parametrize("needed", [Requirement(text) for text in PROJECT["dependencies"]], ids=str)
def test_bounds_are_versions_that_the_tests_run_with(needed: Requirement) -> None:
    lowest = next(each.version for each in needed.specifier if each.operator == ">=")
    assert Version(lowest) == Version(pins(SETS["oldest"])[canonicalize_name(needed.name)])


def test_the_sets_are_in_order() -> None:
    for needed in PROJECT["dependencies"]:
        name = canonicalize_name(Requirement(needed).name)
        versions = [Version(pins(file)[name]) for file in SETS.values()]
        assert versions == sorted(versions), name
