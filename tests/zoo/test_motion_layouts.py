"""Layouts of clips are what the clips show, and read-outs of a transformer learn them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from partsong_zoo import motion
from partsong_zoo.motion.drawing import paint
from partsong_zoo.motion.layouts import KINDS, draw_layouts
from partsong_zoo.motion.model import token_ids
from partsong_zoo.motion.training import Animator, count_nulls
from partsong_zoo.motion.world import COLOURS, GROUND, MOTIONS, SHAPES, SIZES, SPEEDS, draw_scene, generator, layout

CAPTIONS = ["a red circle moves right", "a big blue square bounces up and down slowly, a red circle moves left"]


def test_a_layout_is_what_a_clip_shows() -> None:
    """Its shares of colours, blended, are the painted frames on average; each question's shares have a sum of one."""
    palette = np.asarray([GROUND, *COLOURS.values()], np.float64)
    for index in range(20):
        scene = draw_scene(generator(9, index), pairs=0.8)
        movers = layout(scene, generator(10, index))
        shares = draw_layouts(movers, 4, 6)
        for answers in np.split(shares, np.cumsum(KINDS)[:-1]):
            np.testing.assert_allclose(answers.sum(axis=0), 1, atol=1e-5)
        frames = paint(movers, 12, start=7).reshape(6, 2, 4, 8, 4, 8, 3).mean(axis=(1, 3, 5))
        assert np.abs(np.einsum("ktyx,kc->tyxc", shares[: KINDS[0]], palette) - frames).max() < 1.0
        for item, mover in zip(scene.items, movers, strict=True):
            only = draw_layouts([mover], 4, 6)
            choices_of = [COLOURS, SHAPES, SIZES, MOTIONS, SPEEDS]
            words = (item.colour, item.shape, item.size, item.motion, item.speed)
            for kind, (choices, word) in enumerate(zip(choices_of, words, strict=True)):
                row = sum(KINDS[:kind]) + 1 + [*choices].index(word)
                np.testing.assert_array_equal(only[row], only[1 : KINDS[0]].sum(axis=0))


@pytest.mark.full
def test_read_outs_learn_what_the_clips_have_where() -> None:
    """Shown two clean clips, it soon does better than who knows their mean layout."""
    torch.manual_seed(0)
    clips = [layout(motion.parse(caption), generator(11)) for caption in CAPTIONS]
    layouts = torch.from_numpy(np.stack([draw_layouts(movers, 4, 4) for movers in clips]))
    mean = layouts.mean(dim=0, keepdim=True).expand_as(layouts)
    pairs = zip(mean.split(KINDS, dim=1), layouts.split(KINDS, dim=1), strict=True)
    best = np.mean([float(torch.nn.functional.cross_entropy((m + 1e-9).log(), s)) for m, s in pairs])
    model, latents, ids = Animator(2, 2), torch.randn(2, 4, 4, 8, 8), token_ids(CAPTIONS)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = list[float]()
    for _ in range(60):
        model(latents, torch.zeros(2), ids, count_nulls(ids))
        loss = model.readout.loss(layouts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > best and losses[-1] < best
