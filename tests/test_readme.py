"""What README.md promises at first sight holds: its length, its example, and the report that it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch

from partsong import Ring, launch, predict
from partsong.cli import main
from partsong.planner import MODELS
from partsong.planner.calls import Size
from partsong.zoo import MODELS as ZOO
from tests.documents import FENCE, ROOT, examples, words

README = ROOT / "README.md"
MOST_WORDS = 1000


def test_readme_is_short() -> None:
    assert words(README.read_text(encoding="utf-8")) <= MOST_WORDS


def test_readme_report_is_what_predict_says() -> None:
    row = MODELS["z-image-turbo"]
    with torch.device("meta"):
        model = getattr(diffusers, row.denoiser)(**row.config).to(torch.bfloat16)
    inputs = row.call(Size(height=1024, width=1024), dict(model.config))
    reports = [body for language, body in FENCE.findall(README.read_text(encoding="utf-8")) if language == "text"]
    assert reports == [f"{predict(model, Ring(), ranks=2, **inputs)}\n"]


def printed_by(script: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.full)])
def test_readme_example_runs_with_a_small_model(tmp_path: Path, torchrun: bool) -> None:
    """Under torchrun, as README says, and on ranks of `launch`; the zoo's model stands in for the large one."""
    body = examples(README)[0].replace("Tongyi-MAI/Z-Image-Turbo", str(ZOO["shapes"].folder))
    body = body.replace("height=1024, width=1024", "num_inference_steps=2").replace("bfloat16", "float32")
    body = body.replace("lighthouse.png", str(tmp_path / "lighthouse.png"))
    script = tmp_path / "draw.py"
    script.write_text(body + "    assert image.size == (64, 64)\n")
    if not torchrun:
        said = launch(printed_by, 2, str(script))
        assert "over 2 ranks (ring)" in said and "rank 1 sends" in said
        assert (tmp_path / "lighthouse.png").is_file()
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "over 2 ranks (ring)" in result.stdout and "rank 1 sends" in result.stdout


@pytest.mark.parametrize(
    ("page", "pattern", "num"),
    [("README.md", r'partsong think "([^"]+)=\?" --model sums', 16), ("docs/serve.md", r'"content": "([^"]+)"', 8)],
)
def test_thinking_examples_are_answered_rightly(page: str, pattern: str, num: int, tmp_path: Path) -> None:
    asked = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"))
    assert asked
    for sum_ in asked:
        out, strategy = tmp_path / "result.json", f"self-consistency:num={num}"
        with pytest.raises(SystemExit, match="0"):
            main(["think", f"{sum_}=?", "--model", "sums", "--json", str(out), "--strategy", strategy])
        result = json.loads(out.read_text(encoding="utf-8"))
        first, second = sorted(result["details"]["shares"].values(), reverse=True)[:2]
        # By more than rounding on another processor could change.
        assert result["answer"] == str(value_of(sum_)) and first >= 2 * second


def value_of(text: str) -> int:
    """What a sum of whole numbers comes to."""
    return sum(int(number) for number in re.findall(r"[+-]?\d+", text))
