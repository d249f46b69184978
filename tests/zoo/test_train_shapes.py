"""The recipe runs from nothing to a measured pipeline folder, and resumes; two steps per stage show the plumbing."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from tests.recipe_module import loaded

TINY = (
    "--device cpu --vae-batch 2 --vae-channels 8 --vae-steps 2 --pool-size 32 --text-batch 4 --text-steps 2 "
    "--flow-batch 4 --heads 2 --depth 2 --captions 2 --steps 2 --stages vae,pool,text,flow,evaluate"
)


@pytest.mark.full
def test_recipe_runs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(flow_steps: int) -> str:
        arguments = ["--out", str(tmp_path), *TINY.split(), "--flow-steps", str(flow_steps)]
        monkeypatch.setattr(sys, "argv", ["train_shapes.py", *arguments])
        caplog.clear()
        with loaded("train_shapes") as recipe, caplog.at_level(logging.INFO):
            recipe.main()
        return caplog.text

    assert "resumed" not in run(flow_steps=2)
    report = json.loads((tmp_path / "facts.json").read_text())
    assert report["captions"] == 2
    assert 0.0 <= report["facts_read"] <= 1.0
    assert {"vae", "text.pt", "flow.pt", "export", "samples.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "resumed at step 2" in run(flow_steps=3)
