"""The motion task: captions, endless videos, and a reader that knows right videos from wrong ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from PIL import Image

from partsong.errors import PartsongError
from partsong_zoo import motion
from partsong_zoo.motion.grammar import WORDS, describe, held_out, training_scene, write
from partsong_zoo.motion.reader import as_frames
from partsong_zoo.motion.world import COLOURS, EXTENT, MOTIONS, SHAPES, SIZES, SPEEDS, apart, generator
from tests import covering

CAPTION = "a big red circle moves right slowly, a small blue square bounces up and down"


def wrong(caption: str, shown: str, frames: int = 24, seed: int = 1) -> set[str]:
    """The kinds of facts of `caption` that do not hold in a video of `shown`."""
    held = motion.facts(caption, motion.render(shown, frames, seed))
    return {name.split(":")[0] for name, right in held.items() if not right}


def test_captions_are_fresh_and_follow_seed_and_index() -> None:
    drawn = motion.captions(50, seed=3)
    assert drawn[:20] == motion.captions(20, seed=3)
    assert drawn != motion.captions(50, seed=4)
    assert all(held_out(caption) for caption in drawn)
    assert {word for caption in motion.captions(300, 0) for word in caption.replace(",", " ,").split()} == set(WORDS)


def test_training_never_words_a_held_out_caption() -> None:
    rng = generator(1)
    for _ in range(300):
        scene = training_scene(rng)
        caption = describe(scene, rng)
        assert motion.parse(caption) == scene
        assert not held_out(write(motion.parse(caption)))


def test_parse_reads_what_write_states() -> None:
    for caption in motion.captions(200, seed=5):
        assert write(motion.parse(caption)) == caption
    scene = motion.parse("A large red circle  moves right slowly ,a small blue square moves up and bounces.")
    assert write(scene) == CAPTION


@pytest.mark.parametrize(
    ("caption", "message"),
    [
        ("", "the grammar is"),
        ("a red circle", "the grammar is"),
        ("a red circle moves right,", "the grammar is"),
        ("a red circle moves right quickly slowly", "from ' slowly'"),
        ("a mauve circle moves right", "COLOUR = red"),
        ("a red circle moves right, a red square moves left", "different colours"),
        ("a red circle moves up, a blue square moves up, a green square moves up", "the grammar is"),
    ],
)
def test_other_sentences_are_refused(caption: str, message: str) -> None:
    with pytest.raises(PartsongError, match=message):
        motion.parse(caption)
    assert motion.facts_read(caption, motion.render("a red circle moves right", 5)) is None


def test_a_video_has_no_end_and_no_preferred_moment() -> None:
    long = motion.render(CAPTION, 70, seed=2)
    assert np.array_equal(long[:31], motion.render(CAPTION, 31, seed=2))
    movers = motion.layout(motion.parse(CAPTION), generator(43, 2))
    assert np.array_equal(motion.paint(movers, 10, start=60), long[60:])
    assert not np.array_equal(long[:31], motion.render(CAPTION, 31, seed=3))
    with pytest.raises(PartsongError, match="num_frames=0; use a positive integer"):
        motion.render(CAPTION, 0)


@pytest.mark.parametrize("name", MOTIONS)
def test_motion_is_what_its_words_say(name: str) -> None:
    mover = motion.layout(motion.parse(f"a red circle {name} quickly"), generator(9))[0]
    centres = mover.centres(np.arange(400))
    assert np.ptp(centres[:, 1 - np.flatnonzero(MOTIONS[name])[0]]) == 0
    axis = int(np.flatnonzero(MOTIONS[name])[0])
    if name.startswith("moves"):
        steps = (np.diff(centres[:, axis]) + EXTENT / 2) % EXTENT - EXTENT / 2
        np.testing.assert_allclose(steps, SPEEDS["quickly"] * MOTIONS[name][axis])
    else:
        assert centres[:, axis].min() >= mover.radius
        assert centres[:, axis].max() <= EXTENT - mover.radius
        assert np.abs(np.diff(centres[:, axis])).max() <= SPEEDS["quickly"] + 1e-9
        assert np.ptp(centres[:, axis]) > EXTENT - 2 * mover.radius - 3


def test_objects_on_one_axis_never_meet() -> None:
    scene = motion.parse("a big red circle moves right, a big blue square bounces left and right quickly")
    for seed in range(20):
        movers = motion.layout(scene, generator(seed))
        assert apart(movers)
        gaps = movers[0].centres(np.arange(100))[:, 1] - movers[1].centres(np.arange(100))[:, 1]
        assert np.abs(gaps).min() >= 2 * SIZES["big"]


def test_the_reader_reads_the_renderer_but_for_what_is_hidden() -> None:
    held, single = [], []
    for index, caption in enumerate(motion.captions(200, seed=17)):
        values = motion.facts(caption, motion.render(caption, 7, index)).values()
        (held if "," in caption else single).extend(values)
    assert all(single)
    # In seven frames an object may pass behind another one nearly all the time.
    assert sum(held) >= 0.99 * len(held)
    assert len(held) > 400


@pytest.mark.full
def test_long_videos_are_read() -> None:
    for index, caption in enumerate(motion.captions(3 if covering.FULL else 1, seed=23)):
        video = motion.render(caption, 90, index)
        assert motion.facts_read(caption, video) == 1.0, caption
        assert motion.identity_kept(caption, video) >= 0.98, caption
        assert motion.border_jumps(video, range(8, 90, 8)).ratio <= 1.5, caption
        assert max(motion.trend(video).values()) < 0.02, caption


def test_tracks_lie_on_the_drawn_paths() -> None:
    movers = motion.layout(motion.parse(CAPTION), generator(43, 4))
    tracks = {track.colour: track for track in motion.read(motion.paint(movers, 40))}
    assert set(tracks) == {"red", "blue"}
    for mover in movers:
        track = tracks[mover.colour]
        away = (track.centre - mover.centres(np.arange(40)) + EXTENT / 2) % EXTENT - EXTENT / 2
        assert np.abs(away[track.judged]).max() < 0.15
        assert np.abs(track.radius - mover.radius)[track.judged].max() < 0.3
        assert set(track.shape[track.judged]) == {SHAPES.index(mover.shape)}


@pytest.mark.parametrize(
    ("shown", "kinds"),
    [
        ("a big green circle moves right slowly", {"colour", "shape", "size", "direction", "speed"}),
        ("a big red square moves right slowly", {"shape"}),
        ("a big red triangle moves right slowly", {"shape"}),
        ("a red circle moves right slowly", {"size"}),
        ("a small red circle moves right slowly", {"size"}),
        ("a big red circle moves left slowly", {"direction", "speed"}),
        ("a big red circle moves up slowly", {"direction", "speed"}),
        ("a big red circle moves right", {"speed"}),
        ("a big red circle moves right quickly", {"speed"}),
        ("a big red circle moves right slowly, a small blue square moves right", {"count"}),
    ],
)
def test_wrong_videos_are_told_by_what_is_wrong(shown: str, kinds: set[str]) -> None:
    assert wrong("a big red circle moves right slowly", shown) == kinds


def test_a_bounce_is_no_endless_motion() -> None:
    bounces, moves = "a red circle bounces up and down quickly", "a red circle moves down quickly"
    assert wrong(bounces, moves) == wrong(moves, bounces) == {"direction", "speed"}
    assert not wrong(bounces, bounces)
    still = np.repeat(motion.render(moves, 1), 24, axis=0)
    assert not motion.facts(moves, still)["direction: 1 red circle moves down"]


def test_the_other_objects_facts_do_not_help() -> None:
    swapped = "a big blue circle moves right slowly, a small red square bounces up and down"
    assert wrong(CAPTION, swapped) >= {"shape", "size", "direction"}
    assert wrong(CAPTION, "a big red circle moves right slowly") == {"count", *wrong(CAPTION, CAPTION), *_all_of_one()}


def _all_of_one() -> set[str]:
    return {"colour", "shape", "size", "direction"}


def test_noise_and_blank_videos_hold_nothing() -> None:
    rng = np.random.default_rng(0)
    for video in (np.full((9, 32, 32, 3), 236, np.uint8), rng.integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)):
        assert motion.facts_read(CAPTION, video) == 0.0
        assert motion.identity_kept(CAPTION, video) == 0.0


def test_an_object_behind_another_is_excused_and_one_that_vanished_is_not() -> None:
    caption = "a small red circle moves right, a big blue square moves down"
    for seed in itertools.count():
        video = motion.render(caption, 64, seed)
        track = next(track for track in motion.read(video) if track.colour == "red")
        if track.hidden.any():
            break
    assert motion.identity_kept(caption, video) == 1.0
    alone = motion.render("a small red circle moves right", 40, 0)
    alone[10:14] = alone[0, 0, 0]
    assert motion.identity_kept("a small red circle moves right", alone) == pytest.approx(36 / 40)


def test_identity_counts_the_frames_of_another_colour_shape_or_size() -> None:
    caption = "a red circle moves right"
    video = motion.render(caption, 20, 0)
    for other in ("a blue circle moves right", "a red square moves right", "a big red circle moves right"):
        changed = video.copy()
        changed[15:] = motion.render(other, 20, 0)[15:]
        assert motion.identity_kept(caption, changed) == pytest.approx(15 / 20), other


def test_jumps_at_borders_are_told_from_motion() -> None:
    caption = "a red circle moves right, a blue square bounces up and down quickly"
    video = motion.render(caption, 64, 0)
    smooth = motion.border_jumps(video, [16, 32, 48])
    assert smooth.ratio <= 1.5
    cut = np.concatenate([video[:32], motion.render(caption, 64, 5)[32:]])
    jumps = motion.border_jumps(cut, [16, 32, 48])
    assert jumps.place > 4
    assert jumps.typical <= 1.5 < jumps.ratio
    assert motion.border_jumps(cut, [20, 40]).ratio <= 1.5
    faded = video.astype(np.float32) / 255
    faded[32:] = 0.5 * faded[32:] + 0.5 * faded[0, 0, 0]
    assert motion.border_jumps(faded, [32]).look > 4
    gone = video.copy()
    gone[32:] = motion.render("a red circle moves right", 64, 0)[32:]
    assert motion.border_jumps(gone, [32]).look > 4


def test_trend_is_the_drift_of_colour_and_size() -> None:
    mover = motion.layout(motion.parse("a red circle moves right"), generator(1))[0]
    grown = [
        motion.paint([motion.Mover(**{**_fields(mover), "radius": 4.5 + 0.02 * t})], 1, start=t)[0] for t in range(50)
    ]
    assert motion.trend(grown)["size"] == pytest.approx(0.02 * 49 / 4.99, rel=0.15)
    assert motion.trend(grown)["colour"] < 0.02
    plain = motion.render("a red circle moves right", 50, 0).astype(np.float32) / 255
    fade = np.linspace(0, 0.2, 50)[:, None, None, None]
    assert motion.trend(plain * (1 - fade) + fade * plain[0, 0, 0])["colour"] == pytest.approx(0.2, rel=0.15)
    with pytest.raises(PartsongError, match="no object"):
        motion.trend(np.full((9, 32, 32, 3), 236, np.uint8))


def _fields(mover: motion.Mover) -> dict[str, Any]:
    return {name: getattr(mover, name) for name in ("colour", "shape", "motion", "radius", "speed", "x", "y")}


def test_videos_of_any_kind_are_read_alike() -> None:
    video = motion.render(CAPTION, 6)
    for form in (video, video / 255.0, [Image.fromarray(frame) for frame in video], list(video)):
        np.testing.assert_allclose(as_frames(form), video, atol=1e-3)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((6, 16, 16, 3), np.uint8), r"\(6, 16, 16, 3\)"),
        (np.zeros((6, 32, 32, 3), np.int64), "int64"),
        (np.zeros((3, 32, 32, 3), np.uint8), "at least 5"),
    ],
)
def test_what_is_no_video_is_refused(frames: np.ndarray, message: str) -> None:
    with pytest.raises(PartsongError, match=message):
        motion.facts("a red circle moves right", frames)


@pytest.mark.parametrize("borders", [[], [0], [20], range(1, 20)])
def test_borders_outside_are_refused(borders: Any) -> None:
    with pytest.raises(PartsongError, match="first frames of blocks"):
        motion.border_jumps(motion.render(CAPTION, 20), borders)


def test_the_palette_is_that_of_shapes() -> None:
    from partsong_zoo.shapes.scenes import COLOURS as PALETTE

    assert COLOURS is PALETTE
