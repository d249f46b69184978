"""The pictures of the documentation: what the gallery draws is what the samplers made, and pages show what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from PIL import Image

from partsong import zoo
from partsong.samplers.any_order import LPD
from tests.animation import enlarged, labelled, save_gif
from tests.documents import ROOT
from tests.gallery import ITEMS, SEED, TILED, WatchedTiles, _decided, _filled
from tests.zoo_page import PAGE, measured, page, parameters
from tests.zoo_samples import SAMPLES, answer, drawn_by, read_from

IMAGES = ROOT / "docs" / "images"
#: Megabytes of the pictures of a page, at most.
MOST = {"zoo": 1.5, "gallery": 2.0}


def test_zoo_page_is_what_models_and_files_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.zoo_page"


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_model_is_measured(name: str) -> None:
    share, source = measured(name)
    assert share and (ROOT / source).is_file()


def test_parameters_are_those_of_the_loaded_model() -> None:
    model = zoo.load("lists-ar").model
    # The table of words is stored once where the model uses it twice, and so it is counted once.
    assert parameters(zoo.MODELS["lists-ar"]) == sum(each.numel() for each in model.parameters())


#: Its samples take several calls each.
SLOW = "products"


@pytest.mark.parametrize("name", [name for name, row in zoo.MODELS.items() if row.kind == "text" and name != SLOW])
def test_answers_of_the_zoo_page_are_the_models_own(name: str) -> None:
    sample = json.loads(SAMPLES.read_text(encoding="utf-8"))[name]
    assert answer(name) == sample["text"]


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, row in zoo.MODELS.items() if row.kind != "text"])
def test_pictures_of_the_zoo_page_are_as_right_as_the_models_own(name: str) -> None:
    shown = json.loads(SAMPLES.read_text(encoding="utf-8"))[name]["facts"]
    # Another processor rounds differently, and a fact may be read or not.
    assert mean(read_from(name, *drawn_by(name))) >= mean(shown) - 0.15


@pytest.mark.parametrize("name", MOST)
def test_pictures_of_a_page_are_small(name: str) -> None:
    shown = re.findall(r"!\[[^\]]+\]\((images/[^)]+)\)", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
    paths = [ROOT / "docs" / each for each in shown]
    assert len(paths) >= 4 and sum(path.stat().st_size for path in paths) < MOST[name] * 1e6


def test_a_text_of_the_gallery_is_sorted_and_done_sooner_by_the_bound() -> None:
    one, many = _decided("quota"), _decided("entropy-bound")
    for states in (one, many):
        assert [word[0] for word in states[-1] if word is not None and word[0]] == sorted(ITEMS)
        known = [sum(word is not None for word in state) for state in states]
        assert known == sorted(known)
    assert len(one) > 2 * len(many)


def test_tiles_are_decided_once_each_and_shown_when_they_are() -> None:
    model = zoo.load("tiles")
    watched = WatchedTiles(model.captioned([TILED]))
    decided = LPD().decode(watched, seed=SEED)
    assert (decided.tokens == LPD().decode(model.captioned([TILED]), seed=SEED).tokens).all()
    places = [place for group in watched.groups for place in group]
    assert len(watched.groups) == int(decided.forwards[0]) and sorted(places) == list(range(64))
    picture = model.draw(decided.tokens)[0]
    whole = np.asarray(_filled(picture, watched.groups, len(watched.groups)))
    assert (whole == np.asarray(enlarged(picture, whole.shape[0]))).all()
    first = np.asarray(_filled(picture, watched.groups, 0))
    assert (first != whole).any()


def test_gif_keeps_frames_and_colours(tmp_path: Path) -> None:
    shades = [np.full((4, 4, 3), level, np.float32) for level in (0.0, 0.5, 1.0)]
    save_gif(tmp_path / "a.gif", [labelled([enlarged(each, 16)], [""]) for each in shades], 50, colours=8)
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 3 and film.size == (16, 16)
        for place, level in enumerate((0, 128, 255)):
            film.seek(place)
            assert abs(int(np.asarray(film.convert("RGB"))[8, 8, 0]) - level) <= 8
