"""The scripts of docs/your-script.md run as they stand on several ranks, with tiny pipelines for the large ones."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from partsong import launch
from tests.documents import ROOT, examples, words
from tests.pipelines.cases import CASES

PAGE = ROOT / "docs" / "your-script.md"
KINDS = ("FluxPipeline", "StableDiffusionXLPipeline", "WanPipeline")


def tiny(kind: str) -> Any:
    """Makes a pipeline of this class whose call takes a prompt and draws what the tests' small case draws."""
    case = CASES[kind]
    pipe = case.make()

    class Small(type(pipe)):
        def __call__(self, prompt: str, **given: Any) -> Any:
            own = {"generator": given["generator"]} if "generator" in given else {}
            shown = {"output_type": "np" if kind == "WanPipeline" else "pil"}
            return super().__call__(**{**case.call(1), **own, **shown})

    Small.__name__ = kind
    pipe.__class__ = Small
    return pipe


def run(script: str, kind: str, folder: str) -> None:
    """Runs a script in a folder, on this rank."""
    os.chdir(folder)
    asked: list[Any] = []

    def from_pretrained(_cls: Any, name: str, **options: Any) -> Any:
        asked.append((name, options["dtype"]))
        return tiny(kind)

    getattr(diffusers, kind).from_pretrained = classmethod(from_pretrained)
    runpy.run_path(script, run_name="__main__")
    assert len(asked) == 1 and asked[0][1] in (torch.bfloat16, torch.float16)


def script_of(kind: str, folder: Path) -> str:
    body = next(body for body in examples(PAGE) if f"import {kind}" in body)
    (folder / "draw.py").write_text(body)
    return str(folder / "draw.py")


def test_the_page_is_short_and_has_a_script_for_each_kind() -> None:
    assert words(PAGE.read_text(encoding="utf-8")) <= 400
    assert [re.findall(r"import (\w+Pipeline)", body) for body in examples(PAGE)] == [[kind] for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in KINDS[1:])])
def test_a_script_runs_and_saves_what_one_rank_draws(kind: str, tmp_path: Path) -> None:
    launch(run, 4 if kind == "WanPipeline" else 2, script_of(kind, tmp_path), kind, str(tmp_path))
    if kind == "WanPipeline":
        assert (tmp_path / "waves.mp4").stat().st_size > 0
        return
    files = ("0.png", "1.png") if kind == "FluxPipeline" else ("parallel.png", "alone.png")
    with torch.no_grad():
        for seed, file in enumerate(files):
            drawn = np.asarray(Image.open(tmp_path / file)).astype(int)
            generator = torch.Generator().manual_seed(seed if kind == "FluxPipeline" else 0)
            alone = np.asarray(tiny(kind)("", generator=generator).images[0]).astype(int)
            assert np.abs(drawn - alone).max() <= 1
