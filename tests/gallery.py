"""Draws the pictures of docs/gallery.md: ``python -m tests.gallery --out docs/images``.

Two ranks paint a picture beside one process, make long videos, and one process decodes a text and a picture of tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from partsong import load_text_model, zoo
from partsong.parallel.ranks.launch import launch
from partsong.samplers.any_order import LPD
from partsong.samplers.text import decode_steps
from tests.animation import GREY, INK, PAPER, Pixels, enlarged, font, labelled, save_gif
from tests.gallery_ranks import steps_of, video_of

SEED, SIDE = 7, 160
CAPTION = "a large yellow triangle above a small green circle"
TILED = "a purple cross at the top left and a black square at the bottom right"
MOVING = "a big red circle bounces left and right"
FRAMES = 95
TRAINED = zoo.MODELS["motion"].defaults["num_frames"]
#: A list of the tasks' own, of the longest kind.
ITEMS = ("hen", "fox", "wolf", "urial", "lynx", "ram", "mole", "quail")
PROMPT = f"sort : {' '.join(ITEMS)}"
#: Colours of the steps of a text, one after the other.
STEPS = ((27, 108, 168), (209, 73, 91), (42, 157, 85), (139, 95, 191), (224, 138, 0), (0, 131, 143))


def picture_steps(out: Path) -> None:
    """Draws a picture step by step on one process and with two strategies, and the differences."""
    exact, approximate = (launch(steps_of, 2, each, CAPTION, SEED) for each in ("ulysses", "displaced-patch"))
    factors = (100_000, 10)
    frames = []
    for step, serial in enumerate(exact[0]):
        tiles, labels, largest = [serial], ["one process"], []
        for (_, split), name, factor in zip((exact, approximate), ("Ulysses", "DisplacedPatch"), factors, strict=True):
            difference = np.abs(split[step] - serial)
            tiles += [split[step], 1 - np.clip(difference * factor, 0, 1)]
            labels += [f"{name}, 2 ranks", f"difference x {factor:,}"]
            largest.append(f"{name} {difference.max():.0e}")
        foot = f"after step {step + 2:2} of {len(exact[0]) + 1}; largest difference of a pixel: {', '.join(largest)}"
        frames.append(labelled([enlarged(each, SIDE) for each in tiles], labels, foot))
    save_gif(out / "gallery-steps.gif", frames, 180, colours=250)


def videos(out: Path) -> None:
    """Draws two videos that are longer than those of the training."""
    causal, long = (launch(video_of, 2, each, MOVING, SEED, FRAMES) for each in ("timestep-pipeline", "dual-parallel"))
    frames = []
    for at in range(FRAMES):
        longer = " (longer than any video of the training)" if at >= TRAINED else ""
        tiles = [enlarged(each[at], 7 * len(each[at])) for each in (causal, long)]  # whole blocks of pixels
        labels = ["motion-causal, TimestepPipeline", "motion, DualParallel"]
        frames.append(labelled(tiles, labels, f"frame {at + 1} of {FRAMES}{longer}"))
    save_gif(out / "gallery-videos.gif", frames, 60, last=60, colours=48)


def texts(out: Path) -> None:
    """Draws a text as its tokens are decided, one a step and several."""
    runs = [_decided(rule) for rule in ("quota", "entropy-bound")]
    names = ["quota, one token a step", "entropy-bound, several a step"]
    frames = []
    for step in range(max(len(run) for run in runs)):
        sheet = Image.new("RGB", (5 * SIDE, 212), PAPER)
        pen = ImageDraw.Draw(sheet)
        pen.text((0, 4), PROMPT + " =", fill=INK, font=font(16))
        for line, (run, name) in enumerate(zip(runs, names, strict=True)):
            done = min(step, len(run) - 1)
            ended = f", done after {len(run)} forwards" if step >= len(run) - 1 else f", forward {step + 1}"
            pen.text((0, 34 + 90 * line), name + ended, fill=INK, font=font(13))
            _draw_words(pen, run[done], 54 + 90 * line, done)
        frames.append(sheet)
    save_gif(out / "gallery-text.gif", frames, 500, last=4000, colours=48)


Words = list[tuple[str, int] | None]


def _decided(rule: str) -> list[Words]:
    """Returns after each step the words of the answer, each with the step that decided it; spare ones are empty."""
    model, tokenizer = load_text_model("lists-mdlm"), zoo.load("lists-mdlm").tokenizer
    ids = [tokenizer.encode(PROMPT + " =")]
    words: Words = [None] * zoo.MODELS["lists-mdlm"].defaults["canvas"]
    states: list[Words] = []
    for step in decode_steps(model, ids, rule=rule, max_new_tokens=len(words)):
        for event in step.events:
            if event.token is not None:
                word = tokenizer.decode([event.token], skip_special_tokens=True)
                words[event.position - len(ids[0])] = (word, step.number)
        states.append(list(words))
    return states


def _draw_words(pen: ImageDraw.ImageDraw, words: Words, top: int, step: int) -> None:
    """Draws places in two rows."""
    columns = -(-len(words) // 2)
    width = (5 * SIDE) // columns
    for place, word in enumerate(words):
        left, above = place % columns * width, top + place // columns * 32
        box = (left, above, left + width - 6, above + 26)
        if word is None:
            pen.rectangle(box, fill=GREY)
            continue
        colour = STEPS[word[1] % len(STEPS)]
        pen.rectangle(box, outline=colour, width=3 if word[1] == step else 1)
        pen.text((left + 8, above + 4), word[0], fill=colour, font=font(15))


@dataclass
class WatchedTiles:
    """Keeps which places a picture model was asked for in each forward (a `PictureModel`)."""

    asking: Any
    groups: list[list[int]] = field(default_factory=list)

    @property
    def grid(self) -> int:
        return self.asking.grid

    @property
    def batch(self) -> int:
        return self.asking.batch

    def __call__(self, tokens: Tensor, rank: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        return self.asking(tokens, rank, places, seen)

    def reader(self) -> WatchedTiles:
        self.inner = self.asking.reader()
        return self

    def ask(self, tokens: Tensor, places: Tensor, asked: Tensor, *, mutual: bool) -> Tensor:
        self.groups.append(asked[0].tolist())
        return self.inner.ask(tokens, places, asked, mutual=mutual)


def tiles(out: Path) -> None:
    """Draws a picture of tokens that fills in, one token a forward and in groups."""
    model = zoo.load("tiles")
    runs: list[tuple[Pixels, list[list[int]]]] = []
    for rule in (LPD().serial(), LPD()):
        watched = WatchedTiles(model.captioned([TILED]))
        decided = rule.decode(watched, seed=SEED)
        runs.append((model.draw(decided.tokens)[0], watched.groups))
    frames = []
    for forward in range(max(len(groups) for _, groups in runs)):
        panels = [_filled(picture, groups, forward) for picture, groups in runs]
        counts = [min(forward + 1, len(groups)) for _, groups in runs]
        names = [f"{name}: forward {count}" for name, count in zip(("one by one", "lpd, groups"), counts, strict=True)]
        frames.append(labelled(panels, names))
    save_gif(out / "gallery-tiles.gif", frames, 120, last=3000, colours=128)


def _filled(picture: Pixels, groups: list[list[int]], forward: int) -> Image.Image:
    """Returns what is decided after a forward, as it looks in the finished picture, its newest tokens framed."""
    side, grid = 2 * SIDE, 8
    cell = side // grid
    sheet, known = Image.new("RGB", (side, side), GREY), enlarged(picture, side)
    pen = ImageDraw.Draw(sheet)
    for number, group in enumerate(groups[: forward + 1]):
        for place in group:
            left, top = place % grid * cell, place // grid * cell
            box = (left, top, left + cell, top + cell)
            sheet.paste(known.crop(box), box)
            if number == forward:
                pen.rectangle((left, top, left + cell - 1, top + cell - 1), outline=STEPS[1], width=3)
    return sheet


PARTS: dict[str, Callable[[Path], None]] = {
    "steps": picture_steps,
    "videos": videos,
    "text": texts,
    "tiles": tiles,
}


def main() -> None:
    """Draws what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS), help="which of them")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    for name in arguments.only:
        PARTS[name](arguments.out)


if __name__ == "__main__":
    main()
