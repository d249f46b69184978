"""The recipe runs from nothing to a measured pipeline folder, and resumes; two steps per stage show the plumbing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--device cpu --vae-batch 2 --vae-channels 8 --vae-steps 2 --pool-size 32 --text-batch 4 --text-steps 2 "
    "--flow-batch 4 --heads 2 --depth 2 --captions 2 --steps 2 --stages vae,pool,text,flow,evaluate"
)


def run(out: Path, flow_steps: int) -> str:
    command = [sys.executable, str(ROOT / "recipes" / "train_shapes.py"), "--out", str(out), *TINY.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--flow-steps", str(flow_steps)], capture_output=True, text=True, env=environment, cwd=out
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_recipe_runs_and_resumes(tmp_path: Path) -> None:
    assert "resumed" not in run(tmp_path, flow_steps=10)
    report = json.loads((tmp_path / "facts.json").read_text())
    assert report["captions"] == 2
    assert 0.0 <= report["facts_read"] <= 1.0
    assert {"vae", "text.pt", "flow.pt", "export", "samples.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "resumed at step 10" in run(tmp_path, flow_steps=20)
