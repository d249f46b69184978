"""The demo's page: complete in one file, honest about what was measured, safe against what it prints."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from partsong import parse_strategy, zoo
from partsong.cli import main
from partsong.jobs.demo import DemoJob, Method, methods_for
from partsong.jobs.demo_page import bars, picture, render_page
from partsong.parallel import mesh_for


def method(name: str, kind: str, psnr: float) -> Method:
    facts = {"count: 1": True, "shape: red circle": kind == "exact"}
    return Method(
        name=name,
        kind=kind,
        images=np.zeros((1, 64, 64, 3), np.uint8),
        facts=(facts,),
        psnr=psnr,
        psnr_worst=psnr - 20,
        max_abs_diff=0.25,
        seconds=2.0,
        speedup=1.5,
        bytes_sent=(1_000_000, 3_000_000),
        waiting=0.125,
    )


def page(caption: str = "a red circle") -> str:
    job = DemoJob(captions=(caption,), methods=("ulysses", "displaced-patch"), nproc=2)
    methods = [method("serial", "exact", math.inf), method("ulysses", "exact", math.inf)]
    return render_page(job, [*methods, method("displaced-patch", "approximate", 41.04)], "a machine <b>")


class Tags(HTMLParser):
    """Collects what a browser would fetch, and whether the tags balance."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_needs_no_other_file() -> None:
    text = page()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert len(tags.fetched) == 3
    assert all(source.startswith("data:image/png;base64,") for source in tags.fetched)
    assert not re.search(r"https?://|@import|url\(", text)


def test_page_says_what_was_measured() -> None:
    text = page()
    for fact in (
        "41.0 dB",
        "21.0 dB",
        "equal",
        "1.50x",
        "1.00 to 3.00",
        "12%",
        "1 of 2 facts",
        "NO  shape: red circle",
    ):
        assert fact in text
    assert "correctness" in text
    head = text[: text.index("<figure")]
    assert "<h1>partsong: 2 workers" in head and head.count("1.50x, differs by 0.2") == 2


def test_page_escapes_what_it_prints() -> None:
    text = page("<script>alert(1)</script>")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "a machine &lt;b&gt;" in text


def test_pictures_are_enlarged_whole_pixels() -> None:
    source = picture(np.zeros((64, 64, 3), np.uint8), size=256)
    image = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert image.size == (256, 256)


def test_bars_fill_the_width_once() -> None:
    made = bars([("serial", "exact", 1.0, "1x"), ("ring", "exact", 2.0, "2x")])
    assert [bar.share for bar in made] == [0.5, 1.0]
    assert bars([("ring", "exact", 999.0, "equal")], full=140.0)[0].share == 1.0
    assert bars([]) == []


@pytest.mark.parametrize("nproc", [2, 3, 4, 6])
def test_every_method_fits_its_ranks(nproc: int) -> None:
    for name in methods_for(nproc):
        assert math.prod(mesh_for([parse_strategy(part) for part in name.split("+")], nproc).values()) == nproc


@pytest.mark.skipif(
    not (zoo.MODELS["shapes"].folder / "model_index.json").is_file(), reason="the shapes weights are not there"
)
def test_demo_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, result, sheet = tmp_path / "page.html", tmp_path / "r.json", tmp_path / "sheet.png"
    options = ["demo", "--steps", "1", "--repeats", "1"]
    with pytest.raises(SystemExit) as caught:
        main([*options, "--out", str(out), "--json", str(result), "--picture", str(sheet)])
    assert caught.value.code == 0
    assert str(out) in capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(result.read_text(encoding="utf-8"))["rows"]}
    assert list(rows) == ["serial", *methods_for(2)]
    for name, row in rows.items():
        assert row["class"] == ("approximate" if name == "displaced-patch" else "exact")
        # One step is all warm-up, so here the approximate method is exact too.
        assert row["psnr_to_serial"] > 90
        assert row["facts_read"] == rows["serial"]["facts_read"]
    assert Image.open(sheet).width > 6 * 128
    assert out.read_text(encoding="utf-8").count("data:image/png") == 6 * len(rows)
