"""What `make gpu` runs: stages that fail become rows, and the form for CPUs finds nothing wrong."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.evals.gpu import driver
from partsong.evals.gpu.__main__ import main
from partsong.evals.gpu.findings import Equipment
from partsong.evals.gpu.share import share
from partsong.evals.gpu.trials import TRIALS
from tests.evals import gpu_trials


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of all these stages, and the file."""
    file = tmp_path_factory.mktemp("gpu") / "gpu.json"
    rows = driver.run(gpu_trials.HERE, Equipment(), driver.USUAL_SECONDS, file, {"partsong": "0"})
    return rows, json.loads(file.read_text(encoding="utf-8"))


def of(found: Any, stage: str) -> list[tuple[Any, ...]]:
    return [(row["check"], row["value"], row["ok"]) for row in found[0] if row["stage"] == stage]


@pytest.mark.slow
def test_a_stage_that_fails_becomes_a_row_and_the_rest_goes_on(found: Any) -> None:
    assert of(found, "right") == [("sum", 1.0, True), ("device", "cpu", None)]
    assert of(found, "endless") == [("stage", "ran over its 2 s", False)]
    assert of(found, "dying") == [("before it died", 7, None), ("stage", "died with exit code 3", False)]
    assert of(found, "raising") == [("before it raised", 7, None), ("stage", "ValueError: bad luck", False)]
    assert of(found, "two GPUs") == [("stage", "skipped: it needs 2 GPUs, no GPU", None)]


def test_a_planted_error_is_reported(found: Any) -> None:
    assert of(found, "wrong") == [("planted", "nan", False)]
    assert "planted: nan, expected <= 0.001" in driver.summary(found[0])


def test_the_file_has_what_was_found(found: Any) -> None:
    assert found[1]["rows"] == found[0]
    assert list(found[1]["seconds"]) == sorted(trial.name for trial in gpu_trials.HERE)


def test_without_time_left_a_stage_is_not_ok(tmp_path: Path) -> None:
    rows = driver.run(gpu_trials.HERE[:1], Equipment(), 0.0, tmp_path / "gpu.json", {})
    assert [row["ok"] for row in rows] == [False]


def test_an_unknown_stage_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stages", "attention,sound", "--out", str(tmp_path / "gpu.json")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("partsong: error: no stage is called 'sound'; the stages are backends, ")
    assert told.count("\n") == 1


def test_a_shared_result_names_nobody(tmp_path: Path) -> None:
    secrets = (f"/home/{getpass.getuser()}/run.py", socket.gethostname(), "10.1.2.3:29500")
    rows = [
        {"stage": "drills", "check": "GB/s", "value": f"lost {secret} at 3 GB/s", "expected": "", "ok": False}
        for secret in secrets
    ]
    file = tmp_path / "gpu.json"
    machine = {"gpus": ["H100, 80 GiB"], "host": socket.gethostname()}
    file.write_text(json.dumps({"command": "gpu", "machine": machine, "seconds": {"drills": 1.0}, "rows": rows}))
    text = Path(share(file)["file"]).read_text(encoding="utf-8")
    assert not [secret for secret in secrets if secret in text]
    assert "H100, 80 GiB" in text
    assert text.count("at 3 GB/s") == 3


def test_only_results_are_shared(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]")
    with pytest.raises(ArgumentError, match="is no result of `make gpu`"):
        share(file)


@pytest.mark.full
def test_the_form_for_cpus_finds_nothing_wrong(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    status = main(["--seconds", "1500", "--out", str(file)])
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {row["stage"] for row in rows} == {trial.name for trial in TRIALS}
    assert [row for row in rows if row["ok"] is False] == []
    assert status == 0
