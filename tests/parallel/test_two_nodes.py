"""Two machines under torchrun, each a network namespace: the line of docs/scaling-out.md, and its picture."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from partsong import zoo
from partsong.seeds import generators
from tests.documents import FENCE, ROOT
from tests.parallel.two_nodes import missing, two_nodes

CAPTION = "a red circle left of a blue square"
STEPS, SEED, LIMIT = 4, 7, 200.0


def line_of_the_page() -> list[str]:
    """Returns the command for several machines, as docs/scaling-out.md prints it."""
    page = (ROOT / "docs" / "scaling-out.md").read_text(encoding="utf-8")
    section = page.partition("## Several machines with torchrun")[2].partition("## ")[0]
    block = next(body for _, body in FENCE.findall(section) if "--nnodes" in body)
    return shlex.split(block.replace("\\\n", " ").replace("$HOST", "node-a"))


def changed(command: list[str], out: Path, ranks: int, strategy: str) -> list[str]:
    """Returns the page's command with a small model, this interpreter and other numbers; the rest as printed."""
    assert command[0] == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    for flag, value in {"--nproc-per-node": str(ranks), "--model": "shapes", "--strategy": strategy}.items():
        command[command.index(flag) + 1] = value
    command[command.index("image") + 1] = CAPTION
    return [*command, "--steps", str(STEPS), "--seed", str(SEED), "--out", str(out)]


@pytest.mark.full  # twice two starts of torch on one machine; one machine with two ranks is in test_torchrun.py
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ulysses"), (2, "usp:ulysses_degree=2,ring_degree=2")])
def test_two_machines_paint_the_picture_of_one(ranks: int, strategy: str, tmp_path: Path) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with two_nodes() as nodes:
        # Each machine names a file of its own, as disks are not shared; only the first rank writes.
        runs = [
            subprocess.Popen(
                node.command(*changed(line_of_the_page(), tmp_path / f"{node.host}.png", ranks, strategy)),
                env=environment,
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in nodes
        ]
        try:
            printed = [run.communicate(timeout=LIMIT)[0] for run in runs]
        finally:
            for run in runs:
                run.kill()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(printed)
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == 1  # of the machine with the first rank
    pipe = zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    arguments = {**zoo.MODELS["shapes"].defaults, "num_inference_steps": STEPS}
    serial = pipe(CAPTION, generator=generators(SEED, 1)[0], **arguments).images[0]
    difference = np.abs(np.asarray(Image.open(pictures[0]), int) - np.asarray(serial, int))
    assert difference.max() <= 1  # 8 bits may round apart
    assert re.search(rf"{2 * ranks} ranks|bytes", "\n".join(printed)), printed
