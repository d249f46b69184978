"""Checks the workflows of CI and of releases: what they call exists, and they agree with pyproject.toml."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any

import pytest
import yaml

from partsong import parse_strategy
from partsong.cli import parse
from partsong.cli.options import Image
from partsong.parallel import mesh_for
from tests.documents import ROOT

FOLDER = ROOT / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="an unpacked source has no workflows")

FILES = ("ci.yml", "publish.yml")
#: The folders of the distributions.
DISTRIBUTIONS = (".", "zoo", "zoo/pictures")


def jobs(file: str) -> dict[str, dict[str, Any]]:
    """Reads the jobs of a workflow."""
    return yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))["jobs"]


def steps(file: str) -> list[dict[str, Any]]:
    """Lists the steps of all jobs."""
    return [step for job in jobs(file).values() for step in job["steps"]]


def lines(file: str) -> list[list[str]]:
    """Splits all lines that a workflow runs into words; what its host fills in stays out."""
    scripts = [re.sub(r"\$\{\{.*?\}\}", "", step.get("run", "")) for step in steps(file)]
    return [shlex.split(line) for script in scripts for line in script.splitlines() if line.strip()]


def project(folder: str) -> dict[str, Any]:
    """Reads the metadata of a distribution."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pythons() -> list[str]:
    """Lists the versions of Python that the classifiers name."""
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in project(".")["classifiers"])
    return [match[1] for match in found if match]


def test_every_python_of_the_classifiers_is_tried_on_three_systems() -> None:
    matrix = jobs("ci.yml")["install"]["strategy"]["matrix"]
    assert matrix["python"] == pythons() and len(matrix["os"]) == 3
    assert project(".")["requires-python"] == f">={pythons()[0]}"
    named = [step["with"]["python-version"] for file in FILES for step in steps(file) if "setup-python" in str(step)]
    assert {*named} <= {*pythons(), "${{ matrix.python }}"}


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = {words[1] for file in FILES for words in lines(file) if words[0] == "make"}
    assert called == {"lint", "test"} <= targets


def test_every_other_set_of_versions_is_tested_by_one_job() -> None:
    rows = jobs("ci.yml")["versions"]["strategy"]["matrix"]["include"]
    assert {row["set"]: row["python"] for row in rows} == {"oldest": pythons()[0], "newest": pythons()[-1]}
    assert all((ROOT / f"constraints-{row['set']}.txt").is_file() for row in rows)


def test_commands_parse() -> None:
    commands = [words[1:] for file in FILES for words in lines(file) if words[0] == "partsong"]
    options = [parse(command) for command in commands]
    pictures = [each for each in options if isinstance(each, Image)]
    assert [each.nproc for each in pictures] == [None, 2] and len(options) == 3
    assert mesh_for([parse_strategy(text) for text in pictures[1].strategy], 2)["ulysses"] == 2


def test_all_distributions_are_built_and_checked() -> None:
    built = [words[-1] for words in lines("publish.yml") if words[:3] == ["python", "-m", "build"]]
    assert built == [*DISTRIBUTIONS] and all((ROOT / folder / "pyproject.toml").is_file() for folder in built)
    text = (FOLDER / "publish.yml").read_text(encoding="utf-8")
    names = re.search(r"for name in ([\w ]+); do", text)
    assert names and names[1].split() == [project(folder)["name"].replace("-", "_") for folder in DISTRIBUTIONS]
    limits = re.findall(r"\.st_size < ([\d_]+)", (ROOT / "tests" / "test_wheel.py").read_text(encoding="utf-8"))
    assert re.findall(r"-size \+(\d+)c", text) == [limit.replace("_", "") for limit in limits]
    installed = next(words for words in lines("ci.yml") if words[-2:] == [".", "./zoo"])
    assert installed[:4] == ["python", "-m", "pip", "install"]


def test_the_checklist_builds_what_the_workflow_does() -> None:
    checklist = (ROOT / "docs" / "releasing.md").read_text(encoding="utf-8")
    built = {tuple(shlex.split(line)[3:]) for line in re.findall(r"^python -m build.*", checklist, re.MULTILINE)}
    assert built == {(), ("--wheel", "zoo"), ("--wheel", "zoo/pictures")}


@pytest.mark.parametrize("file", FILES)
def test_only_the_job_that_publishes_may_write(file: str) -> None:
    whole = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))
    assert whole["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in whole["jobs"].items() if "permissions" in job}
    assert granted == ({"publish": {"id-token": "write"}} if file == "publish.yml" else {})
    uses = [step["uses"] for step in steps(file) if "uses" in step]
    assert uses and all(re.fullmatch(r"[\w/-]+@(v\d+|release/v\d+|[0-9a-f]{40})", each) for each in uses)
