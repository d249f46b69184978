"""Checks the files with which a server is deployed: options and users that can be read, a unit systemd takes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from partsong.cli import parse
from partsong.cli.config_file import ConfigFile
from partsong.serving.access.user_tables import read_users
from tests.documents import ROOT

DEPLOY = ROOT / "docs" / "deploy"


def test_the_options_and_users_of_the_example_are_read(tmp_path: Path) -> None:
    options = parse(["serve", "--config", str(DEPLOY / "partsong.toml"), "--model", "shapes-unet", "--port", "9000"])
    assert options.model == ("shapes", "motion", "shapes-unet"), "the command line adds to lists"
    assert (options.replicas, options.outputs_days, options.log_format, options.port) == (2, 30, "json", 9000)
    for name in ("ada", "ops"):
        (tmp_path / f"{name}.key").write_text(f"a-key-for-{name}-0123456789")
    users = read_users(ConfigFile.read(str(DEPLOY / "partsong.toml")).users, tmp_path).values()
    assert [(user.name, user.is_operator, user.jobs, user.requests) for user in users] == [
        ("ada", False, 8, 4), ("ops", True, None, None),
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "partsong.service").read_text().replace("/opt/partsong/bin/partsong", "/bin/true")
    (tmp_path / "partsong.service").write_text(unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "partsong.service")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_installs_what_the_packages_are_called() -> None:
    steps = (DEPLOY / "Containerfile").read_text()
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert f"pip install --no-cache-dir {torch}" in steps
    assert 'CMD ["partsong", "serve", "check", "http://127.0.0.1:8000"]' in steps
    assert parse(["serve", "check", "http://127.0.0.1:8000"]).url == "http://127.0.0.1:8000"
