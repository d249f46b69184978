"""The wheel has what users need and nothing else, and a command of it runs in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from partsong import __version__
from tests.documents import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel without the network: the builder is in the environment or the test is skipped."""
    pytest.importorskip("hatchling", reason="hatchling is not installed, and a test does not download it")
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=200)
    return next(folder.glob("*.whl"))


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"partsong", f"partsong-{__version__}.dist-info"}
    kept = subprocess.run(["git", "ls-files", "partsong"], cwd=ROOT, capture_output=True, text=True)
    if kept.returncode == 0:  # a checkout, not an unpacked source
        assert {name for name in names if name.startswith("partsong/")} == set(kept.stdout.split())
    assert any(name.endswith(".safetensors") for name in names), "the zoo's weights"
    assert any(name.startswith("partsong/serving/") and not name.endswith(".py") for name in names), "the server's page"
    metadata = zipfile.ZipFile(wheel).read(f"partsong-{__version__}.dist-info/entry_points.txt").decode()
    assert "partsong = partsong.cli:main" in metadata and "[inspect_ai]" in metadata


@pytest.mark.full
def test_command_of_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment that sees what is installed here, but not this repository."""
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh" / "bin" / "python"
    site = next((tmp_path / "fresh" / "lib").glob("python*")) / "site-packages"
    subprocess.run(
        [*PIP, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)], check=True, timeout=200
    )
    # After the wheel's own folder, so that its partsong comes first.
    installed = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "zz_installed.pth").write_text("\n".join(installed))
    where = [str(python), "-c", "import partsong; print(partsong.__file__)"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 200, "env": {"PATH": "/usr/bin:/bin"}}
    assert str(site) in subprocess.run(where, **run).stdout
    listed = subprocess.run([str(python.with_name("partsong")), "list", "strategies"], **run)
    assert listed.returncode == 0 and "displaced-patch" in listed.stdout, listed.stderr
