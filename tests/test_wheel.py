"""The wheels have what users need and nothing else, and work in environments of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from partsong import __version__
from tests.documents import ROOT
from tests.test_workflows import pythons

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

#: What the core does alone: attach two ranks to a pipeline of random weights, and say where the models are.
ALONE = """
import torch
from diffusers import DiTPipeline, DiTTransformer2DModel
from partsong import Mesh, Ring, launch, parallelize, zoo

def denoise(_=None):
    torch.manual_seed(0)
    model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4,
                                  num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10).eval().double()
    inputs = {"hidden_states": torch.randn(1, 4, 8, 8).double(), "timestep": torch.tensor([3]),
              "class_labels": torch.tensor([1])}
    with torch.no_grad():
        alone = model(**inputs).sample
        with Mesh(ring=2) as mesh, parallelize(model, Ring(), mesh=mesh):
            return float((model(**inputs).sample - alone).abs().max())

if __name__ == "__main__":
    assert launch(denoise, 2) < 1e-10
    assert not zoo.MODELS
    try:
        zoo.load("shapes")
    except ValueError as error:
        assert "pip install partsong-zoo" in str(error), error
"""


def build(project: Path, folder: Path) -> Path:
    """Builds a wheel without the network: the builder is in the environment or the test is skipped."""
    pytest.importorskip("hatchling", reason="hatchling is not installed, and a test does not download it")
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(project)]
    subprocess.run(command, check=True, timeout=200)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def zoo_wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [build(project, tmp_path_factory.mktemp("zoo")) for project in (ROOT / "zoo", ROOT / "zoo" / "pictures")]


def tracked(folder: str) -> set[str] | None:
    """Names the files of a folder that git keeps; None in an unpacked source."""
    kept = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    return set(kept.stdout.split()) if kept.returncode == 0 else None


def names_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    assert names == (tracked("partsong") or names) and all(name.startswith("partsong/") for name in names)
    assert not any(name.endswith(".safetensors") for name in names), "weights come with partsong-zoo"
    assert wheel.stat().st_size < 2_000_000
    assert any(name.startswith("partsong/serving/") and not name.endswith(".py") for name in names), "the server's page"
    metadata = zipfile.ZipFile(wheel).read(f"partsong-{__version__}.dist-info/entry_points.txt").decode()
    assert "partsong = partsong.cli:main" in metadata and "[inspect_ai]" in metadata


@pytest.mark.full
def test_what_an_index_shows_leads_to_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("METADATA"))
        shown = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", shown)
    assert f"https://raw.githubusercontent.com/partsong/partsong/v{__version__}/docs/images/demo.png" in links
    assert f"https://github.com/partsong/partsong/blob/v{__version__}/docs/README.md" in links
    assert all(link.startswith("https://") for link in links)


def test_wheels_of_the_zoo_have_every_file_once(zoo_wheels: list[Path]) -> None:
    first, second = map(names_in, zoo_wheels)
    assert not first & second
    kept = tracked("zoo/partsong_zoo")
    assert kept is None or {f"zoo/{name}" for name in first | second} == kept
    assert all(wheel.stat().st_size < 85_000_000 for wheel in zoo_wheels)


def environment(folder: Path, *wheels: Path) -> tuple[Path, dict[str, Any]]:
    """Makes an environment with these wheels, which sees what is installed here but not this repository."""
    venv.create(folder / "fresh", with_pip=False)
    python = folder / "fresh" / "bin" / "python"
    site = next((folder / "fresh" / "lib").glob("python*")) / "site-packages"
    install = [*PIP, "--python", str(python), "install", "--quiet", "--no-deps", *map(str, wheels)]
    subprocess.run(install, check=True, timeout=200)
    # By links, so that neither the packages of this repository nor their entry points come along.
    for here in (Path(path) for path in sys.path if Path(path).name == "site-packages"):
        for item in here.iterdir():
            if not item.name.startswith(("partsong", "_partsong", "__editable__")) and not (site / item.name).exists():
                (site / item.name).symlink_to(item)
    return python, {
        "cwd": folder,
        "capture_output": True,
        "text": True,
        "timeout": 200,
        "env": {"PATH": "/usr/bin:/bin"},
    }


@pytest.mark.full
def test_the_core_alone_plans_lists_and_parallelizes(wheel: Path, tmp_path: Path) -> None:
    python, run = environment(tmp_path, wheel)
    (tmp_path / "alone.py").write_text(ALONE)
    ran = subprocess.run([str(python), "alone.py"], **run)
    assert ran.returncode == 0, ran.stderr
    command = str(python.with_name("partsong"))
    listed = subprocess.run([command, "list", "strategies"], **run)
    assert listed.returncode == 0 and "displaced-patch" in listed.stdout, listed.stderr
    planned = subprocess.run([command, "plan", "--model", "sd3.5-medium", "--gpus", "2x4090", "--link", "pcie4"], **run)
    assert planned.returncode == 0, planned.stderr
    refused = subprocess.run([command, "image", "a red circle", "--model", "shapes"], **run)
    assert refused.returncode == 2 and "pip install partsong-zoo" in refused.stderr, refused.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
def test_with_the_zoo_the_demo_runs(wheel: Path, zoo_wheels: list[Path], tmp_path: Path) -> None:
    python, run = environment(tmp_path, wheel, *zoo_wheels)
    run["timeout"] = 600
    demo = subprocess.run([python.with_name("partsong"), "demo", "--out", "demo.html"], **run)
    assert demo.returncode == 0 and (tmp_path / "demo.html").stat().st_size > 50_000, demo.stderr


def interpreter(version: str) -> str:
    """Finds this Python, or skips the test; what some managers of versions put on PATH does not start."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"no python{version} on PATH that starts")
    return python


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", pythons())
def test_in_an_empty_environment_its_commands_run(
    version: str, wheel: Path, zoo_wheels: list[Path], tmp_path: Path
) -> None:
    subprocess.run([interpreter(version), "-m", "venv", "--without-pip", tmp_path / "fresh"], check=True, timeout=200)
    there, elsewhere = tmp_path / "fresh" / "bin", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run: dict[str, Any] = {"cwd": elsewhere, "capture_output": True, "text": True, "timeout": 900}
    install = [*PIP, "--python", str(there / "python"), "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    without_paths = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # As the Makefile does it: a torch that the rest would replace with a larger one is here first.
    if (torch := subprocess.run([*install, "torch"], env=without_paths, **run)).returncode != 0:
        pytest.skip(f"no torch to install for Python {version}: {torch.stderr.strip()}")
    rest = subprocess.run([*install, wheel, *zoo_wheels], env=without_paths, **run)
    assert rest.returncode == 0, rest.stderr

    def run_there(command: str, *arguments: str) -> str:
        ran = subprocess.run([there / command, *arguments], env={"PATH": "/usr/bin:/bin"}, **run)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    script = "import sys, partsong, partsong_zoo; print(sys.version, partsong.__file__, partsong_zoo.__file__)"
    shown = run_there("python", "-c", script)
    assert shown.startswith(f"{version}.") and shown.count(str(tmp_path / "fresh")) == 2
    drawn = run_there("partsong", "image", "a red circle", "--model", "shapes-unet", "--out", "circle.png")
    assert "read back from the image: 100%" in drawn and (elsewhere / "circle.png").exists()
    assert "answer: " in run_there("partsong", "text", "12+34=?", "--model", "sums")
    vote = ("--strategy", "self-consistency:num=16")
    assert run_there("partsong", "think", "37+48-19=?", "--model", "sums", *vote).startswith("66\n")
