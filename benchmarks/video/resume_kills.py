"""Kills long videos at random moments and resumes them: ``python benchmarks/video/resume_kills.py``.

Each trial runs ``partsong video`` with a journal and kills one of its ranks after a random part of the time that an
undisturbed run takes. It resumes on a random number of ranks and compares the frames with the undisturbed ones.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro
from PIL import Image

from benchmarks.filing import file_result, markdown_table, result_path

METHODS = {
    "dual-parallel": ("motion", ("dual-parallel:admit_every=2",)),
    "dual-parallel, recomputed": ("motion", ("dual-parallel:previous=recomputed,context=4",)),
    "timestep-pipeline": ("motion-causal", ("timestep-pipeline",)),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how often to kill."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    kills: int = 20
    """Trials, spread over the methods."""
    frames: int = 95
    """Frames of each video."""
    most: int = 3
    """Largest number of ranks."""
    seed: int = 0
    """Seed of the trials."""


def main(config: Config) -> None:
    """Runs the trials and writes the files."""
    draw, rows = random.Random(config.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = {method: _undisturbed(config, method, folder / f"whole-{i}") for i, method in enumerate(METHODS)}
        for number in range(config.kills):
            method = list(METHODS)[number % len(METHODS)]
            before, after = draw.randint(1, config.most), draw.randint(1, config.most)
            rows.append(_trial(config, method, before, after, draw, folder / f"trial-{number}", whole[method]))
            print(rows[-1], flush=True)
    note = (
        "A rank is killed with SIGKILL; the journal is read by the resumed run, on as many ranks as the table says. "
        "Equal: every frame of the resumed video is the undisturbed run's, bit for bit."
    )
    columns = ("method", "ranks before", "after", "killed at, s", "blocks done then", "frames", "equal")
    lines = [tuple(row.values()) for row in rows]
    title = f"Killed and resumed, {sum(row['equal'] for row in rows)} of {len(rows)} equal"
    file_result(config.out, __file__, rows, title, note, markdown_table(columns, lines))


def _command(config: Config, method: str, nproc: int, out: Path, *more: str) -> list[str]:
    model, strategies = METHODS[method]
    command = [sys.executable, "-m", "partsong", "video", "a big red circle bounces left and right", "--model", model]
    for strategy in strategies:
        command += ["--strategy", strategy]
    return [*command, "--frames", str(config.frames), "--nproc", str(nproc), "--out", str(out), *more]


def _undisturbed(config: Config, method: str, folder: Path) -> tuple[np.ndarray, dict[int, float]]:
    """Returns the frames, and how long the command takes on each number of ranks."""
    seconds, frames = {}, np.empty(0)
    for nproc in range(1, config.most + 1):
        start, out = time.perf_counter(), folder / f"ranks-{nproc}"
        subprocess.run(_command(config, method, nproc, out), check=True, stdout=subprocess.DEVNULL)
        seconds[nproc] = time.perf_counter() - start
        written = _read(out)
        assert frames.size == 0 or np.array_equal(written, frames), f"{method} on {nproc} ranks makes another video"
        frames = written
    return frames, seconds


def _read(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])


def _trial(
    config: Config,
    method: str,
    before: int,
    after: int,
    draw: random.Random,
    folder: Path,
    whole: tuple[np.ndarray, dict[int, float]],
) -> dict[str, Any]:
    journal, frames = folder / "journal", whole[0]
    delay, victim = whole[1][before] * draw.uniform(0.3, 1.0), draw.random()
    command = _command(config, method, before, folder / "killed", "--journal", str(journal))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=delay)
    except subprocess.TimeoutExpired:
        _kill(process.pid, victim)
        process.wait()
    done = len(list(journal.glob("block-*.safetensors")))
    command = [sys.executable, "-m", "partsong", "video", "--resume", str(journal)]
    again = _command(config, method, after, folder / "again")
    if not (journal / "command.json").exists():  # killed before it had begun
        command = [*again, "--journal", str(journal)]
    else:
        command += ["--nproc", str(after), "--out", str(folder / "again")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    written = _read(folder / "again")
    return {
        "method": method,
        "before": before,
        "after": after,
        "seconds": round(delay, 1),
        "blocks": done,
        "frames": len(written),
        "equal": bool(written.shape == frames.shape and np.array_equal(written, frames)),
    }


def _kill(pid: int, victim: float) -> None:
    """Kills one of the processes that sample: a rank, or the command itself if it started none."""
    family = [p for p in psutil.Process(pid).children(recursive=True) if p.cpu_times().user > 0.5]
    chosen = family[int(victim * len(family))] if family else psutil.Process(pid)
    chosen.kill()


if __name__ == "__main__":
    main(tyro.cli(Config))
