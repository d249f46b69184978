"""The shapes task: captions, parsing, drawing and the reader that is the quality metric."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from partsong_zoo import shapes
from partsong_zoo.scoring import FactScore
from partsong_zoo.shapes.drawing import paint
from partsong_zoo.shapes.grammar import describe, held_out, write
from partsong_zoo.shapes.scenes import PLACES, draw_things, generator
from tests import covering

NUM_SCENES = 300
SCENES = [draw_things(generator(101, index)) for index in range(NUM_SCENES)]
CAPTIONS = [describe(things, generator(102, index)) or "" for index, things in enumerate(SCENES)]
PICTURES = np.stack([paint(things) for things in SCENES])


def blurred(pictures: NDArray[np.float32]) -> NDArray[np.float32]:
    """A soft decoder: each pixel half itself, half its four neighbours."""
    p = np.pad(pictures, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    neighbours = p[:, :-2, 1:-1] + p[:, 2:, 1:-1] + p[:, 1:-1, :-2] + p[:, 1:-1, 2:]
    return 0.5 * pictures + 0.125 * neighbours


def noisy(pictures: NDArray[np.float32], strength: float) -> NDArray[np.float32]:
    noise = np.random.default_rng(0).normal(0.0, strength, pictures.shape)
    return np.clip(pictures + noise, 0.0, 1.0).astype(np.float32)


def total_read(captions: list[str], pictures: NDArray[np.float32]) -> float:
    held = [shapes.facts(caption, picture) for caption, picture in zip(captions, pictures, strict=True)]
    return float(np.mean([value for row in held for value in row.values()]))


@pytest.mark.parametrize(
    "damage", [*(pytest.param(name, marks=pytest.mark.full) for name in ("none", "noise")), "blur and noise"]
)
def test_reader_reads_the_truth(damage: str) -> None:
    pictures = (PICTURES / 255.0).astype(np.float32)
    if damage == "blur and noise":
        pictures = noisy(blurred(pictures), 0.04)
    elif damage == "noise":
        pictures = noisy(pictures, 0.06)
    assert total_read(CAPTIONS, pictures) >= 0.995


def test_reader_measures_what_was_drawn() -> None:
    for things, picture in zip(SCENES[:60], PICTURES, strict=False):
        found = {thing.colour: thing for thing in shapes.read(picture)}
        assert set(found) == {thing.colour for thing in things}
        for thing in things:
            seen = found[thing.colour]
            assert abs(seen.x - thing.x) < 1.5
            assert abs(seen.y - thing.y) < 1.5
            assert abs(seen.radius - thing.radius) < 1.2


def test_reader_refuses_the_wrong_picture() -> None:
    pictures = (PICTURES / 255.0).astype(np.float32)
    num = len(CAPTIONS) if covering.FULL else 100
    assert total_read(CAPTIONS[:num], np.roll(pictures[:num], 1, axis=0)) < 0.3
    assert total_read(CAPTIONS[:50], np.full_like(pictures[:50], 0.93)) == 0.0
    assert total_read(CAPTIONS[:50], np.random.default_rng(0).random((50, 64, 64, 3)).astype(np.float32)) < 0.1


@pytest.mark.parametrize(
    ("caption", "lie", "kind"),
    [
        ("a red circle left of a blue square", "a red circle right of a blue square", "relation"),
        ("a red circle above a blue square", "a red square above a blue square", "shape"),
        ("a red circle and a blue square", "a red circle and a green square", "colour"),
        ("a small red circle", "a large red circle", "size"),
        ("a red circle at the top left", "a red circle at the bottom left", "place"),
        ("a red circle and a blue square", "a red circle", "count"),
    ],
)
def test_each_kind_of_lie_is_noticed(caption: str, lie: str, kind: str) -> None:
    picture = shapes.render(shapes.parse(caption))
    assert shapes.facts_read(caption, picture) == 1.0
    false = [name for name, held in shapes.facts(lie, picture).items() if not held]
    assert any(name.startswith(kind) for name in false)


def test_swapped_attributes_are_noticed() -> None:
    picture = shapes.render(shapes.parse("a red circle left of a blue square"))
    assert (shapes.facts_read("a blue circle left of a red square", picture) or 0.0) <= 0.5


def test_pictures_of_every_kind_read_alike() -> None:
    caption = "a large green triangle below a small black cross"
    array = shapes.render(shapes.parse(caption))
    for image in (array, (array / 255.0).astype(np.float32), Image.fromarray(array)):
        assert shapes.facts_read(caption, image) == 1.0
    assert shapes.facts_read(caption, shapes.render(shapes.parse(caption), height=128, width=192)) == 1.0
    with pytest.raises(ValueError, match="RGB"):
        shapes.read(array[..., 0])
    with pytest.raises(ValueError, match="int64"):
        shapes.read(array.astype(np.int64))


def test_captions_are_a_function_of_seed_and_index() -> None:
    assert shapes.captions(5, seed=7) == shapes.captions(40, seed=7)[:5]
    assert shapes.captions(40, seed=7) != shapes.captions(40, seed=8)
    assert all(held_out(caption) for caption in shapes.captions(40, seed=7))
    assert not any(held_out(caption) for caption in CAPTIONS)


def test_captions_parse_back_to_themselves_and_can_be_drawn() -> None:
    for index, caption in enumerate(shapes.captions(60, seed=3)):
        scene = shapes.parse(caption)
        assert write(scene) == caption
        assert shapes.facts_read(caption, shapes.render(scene, seed=index)) == 1.0


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("A small red circle to the left of a blue square.", "a small red circle left of a blue square"),
        ("a red circle , a blue square, and a green cross", "a red circle, a blue square and a green cross"),
        ("a red circle in the top-left", "a red circle at the top left"),
        ("the black cross at the centre", "a black cross at the center"),
    ],
)
def test_parsing_is_lenient_about_wording(said: str, meant: str) -> None:
    assert shapes.parse(said) == shapes.parse(meant)


@pytest.mark.parametrize(
    "foreign",
    ["", "a dog", "red", "a red circle above", "a red circle left of", "a red circle and a dog", "a pink circle"],
)
def test_foreign_sentences(foreign: str) -> None:
    with pytest.raises(ValueError, match="the grammar is"):
        shapes.parse(foreign)
    assert shapes.facts_read(foreign, PICTURES[0]) is None


def test_contradictions_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no layout"):
        shapes.render(shapes.parse("a red circle at the left right of a blue square at the right"))


def test_same_colour_twice() -> None:
    caption = "a red circle left of a red square"
    picture = shapes.render(shapes.parse(caption))
    assert shapes.facts_read(caption, picture) == 1.0
    assert shapes.facts_read("a red square left of a red circle", picture) != 1.0


def test_places_are_the_nine_thirds() -> None:
    assert len(set(PLACES)) == 9
    for place in PLACES:
        caption = f"a small blue cross at the {place}"
        assert shapes.facts_read(caption, shapes.render(shapes.parse(caption))) == 1.0


def test_importing_the_zoo_is_cheap() -> None:
    code = "import sys, partsong.zoo; print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scores_come_as_a_row_with_their_error() -> None:
    held = [{"count": True, "colour:a": True}, {"count": False, "colour:a": True}, {"count": False, "colour:a": False}]
    result = FactScore(captions=["", "", ""], facts=held)
    assert result.report() == {
        "facts_read": 0.5,
        "all_right": 0.3333,
        "by_kind": {"count": [0.3333, 3], "colour": [0.6667, 3]},
    }
    assert result.standard_error == pytest.approx(0.5 / 3**0.5)  # shares 1, 0.5 and 0 deviate by 0.5
