"""Rolling noise against one frame at a time, and against windows cut out one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import ArgumentError
from partsong.samplers.denoising.rolling_noise import rolling_noise

SIGMAS = torch.tensor([0.1, 0.3, 0.6, 0.75, 0.9, 1.0], dtype=torch.float64)
MEAN, VARIANCE = 0.7, 0.3


def noise(frame: int) -> Tensor:
    return seeds.noise(seeds.derive(3, frame), (2, 3, 1, 2, 2)).double()


def posterior_mean(x: Tensor, sigma: Tensor) -> Tensor:
    """Of independent normal frames: what the best denoiser would say."""
    s = sigma[:, None, :, None, None]
    signal = 1 - s
    return MEAN + signal * VARIANCE / (signal**2 * VARIANCE + s**2) * (x - signal * MEAN)


def windowed(x: Tensor, sigma: Tensor) -> Tensor:
    """A denoiser whose frames look at each other."""
    place = torch.arange(x.shape[2], dtype=x.dtype)[:, None, None]
    return 0.5 * x + 0.3 * (place * x).mean(dim=2, keepdim=True) - 0.1 * sigma[:, None, :, None, None]


def first() -> Tensor:
    return torch.stack([seeds.noise(i, (2, 3, 2, 2)) for i in range(3)], dim=2).double()


def test_frames_that_do_not_look_at_each_other_are_each_sampled_alone() -> None:
    got = torch.cat(list(rolling_noise(posterior_mean, first(), SIGMAS, noise, num_frames=9, window=4)), dim=2)
    for number in range(9):
        # Frames of the first queue begin at the level they stand at, later ones at the last.
        start = min(number, len(SIGMAS) - 1)
        clean = first()[:, :, min(number, 2)][:, :, None] if number < len(SIGMAS) else torch.zeros(2, 3, 1, 2, 2)
        x = (1 - SIGMAS[start]) * clean + SIGMAS[start] * noise(number)
        for level in range(start, -1, -1):
            sigma, after = SIGMAS[level], SIGMAS[level - 1] if level else SIGMAS.new_zeros(())
            velocity = (x - posterior_mean(x, sigma.expand(2, 1))) / sigma
            x = x + (after - sigma) * velocity
        torch.testing.assert_close(got[:, :, number : number + 1], x, rtol=1e-12, atol=1e-12)


def test_each_frame_is_seen_from_the_noisier_half_of_its_window() -> None:
    window, half, got = 4, 2, []
    past = [first()[:, :, 0]] * half
    queue = [(1 - s) * first()[:, :, min(i, 2)] + s * noise(i)[:, :, 0] for i, s in enumerate(SIGMAS)]
    levels = [torch.zeros((), dtype=torch.float64)] * half + list(SIGMAS)
    for number in range(7):
        row, new = [*past, *queue], []
        for place in range(len(queue)):
            begin = place // half * half
            x = torch.stack(row[begin : begin + window], dim=2)
            sigma = torch.stack(levels[begin : begin + window]).expand(2, -1)
            clean = windowed(x, sigma)[:, :, place - begin + half]
            after = SIGMAS[place - 1] if place else 0.0
            new.append(queue[place] + (after - SIGMAS[place]) * (queue[place] - clean) / SIGMAS[place])
        got.append(new[0])
        past, queue = [*past[1:], new[0]], [*new[1:], noise(number + len(SIGMAS))[:, :, 0]]
    ours = torch.cat(list(rolling_noise(windowed, first(), SIGMAS, noise, num_frames=7, window=window)), dim=2)
    torch.testing.assert_close(ours, torch.stack(got, dim=2), rtol=1e-12, atol=1e-12)


def test_a_longer_video_begins_with_a_shorter_one() -> None:
    short = list(rolling_noise(windowed, first(), SIGMAS, noise, num_frames=3, window=4))
    long = list(rolling_noise(windowed, first(), SIGMAS, noise, num_frames=12, window=4))
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=False))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"window": 3}, "window=3; use an even number"),
        ({"window": 8}, "use a multiple of 4"),
        ({"sigmas": SIGMAS.flip(0)}, "must rise"),
        ({"sigmas": SIGMAS - 0.1}, "must rise from above 0"),
        ({"first": torch.zeros(2, 3, 2, 2)}, "give clean frames"),
        ({"num_frames": 0}, "num_frames=0"),
    ],
)
def test_refusals(changed: dict[str, Any], words: str) -> None:
    named: dict[str, Any] = {"first": first(), "sigmas": SIGMAS, "num_frames": 2, "window": 4} | changed
    start, sigmas = named.pop("first"), named.pop("sigmas")
    with pytest.raises(ArgumentError, match=words):
        rolling_noise(windowed, start, sigmas, noise, **named)
