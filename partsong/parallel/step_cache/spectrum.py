"""Compares what the first block gets in two steps, after a filter that keeps what is not noise in either."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.cuts.token_grid import Lengths, token_grid
from partsong.parallel.cuts.tokens import SequenceParallel
from partsong.parallel.hooks.known_values import KnownValues
from partsong.parallel.ranks.collectives import all_to_all
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.step_cache.measures import compared
from partsong.parallel.strategy import Site

__all__ = ["Spectrum", "SpectrumBytes", "filtered", "gains", "tokens_to_channels"]

#: Noise over signal beyond which nothing but the mean is signal.
_ALL_NOISE = 1e6


class Spectrum:
    """Gives a measure all tokens of a picture for this rank's channels, and compares them after the filter.

    The filter works on every channel by itself and needs all tokens of it, so ranks that hold parts of the tokens swap
    them for parts of the channels. Nothing else is gathered, and the sums over all channels are those of one rank.

    Args:
        denoiser: the denoiser.
        samples: number of samples that decide for themselves.

    Raises:
        UnsupportedError: no scheduler says how much of this generation's steps is noise.

    Source: SeaCache, arXiv 2602.18993.
    """

    def __init__(self, denoiser: Site, samples: int) -> None:
        self.denoiser, self.samples = denoiser, samples
        self._steps = (-1, -1)
        self._grid: Lengths | None = None
        self._known = KnownValues()
        if denoiser.clock.noise_ratio(denoiser.clock.step) is None and not denoiser.shared.dry:
            raise UnsupportedError(
                f'StepCache(measure="spectral") on {denoiser.adapter.model}: no scheduler says how much of a step\'s '
                "input is noise; sample with a pipeline that has DDIM, DPM-Solver, Euler or flow matching, or use "
                'measure="first_block"'
            )

    def taken(self, seen: Tensor) -> Tensor:
        """Takes the tokens of a step.

        Args:
            seen: what the first block gets, `[B, L, C]`, this rank's tokens.

        Returns:
            `[B, C, F, H, W]`, all tokens for this rank's channels.

        Raises:
            UnsupportedError: they are not those of a picture whose grid is known.
        """
        site = self.denoiser
        if isinstance(site.cut, SequenceParallel):
            sizes = site.cut.shard_sizes((IMAGE,))
            own, least = sizes[site.cut.axis.index], min(site.adapter.least_tokens, sum(sizes))
            if seen.shape[1] != max(own, least):  # there are words among them, here and on all ranks
                raise self._no_grid(seen.shape[1])
            seen = tokens_to_channels(site.cut.axis, seen[:, :own], sizes)
        if self._grid is None:
            config: Any = site.module.config
            self._grid, total = token_grid(site.adapter, config, site.given, self._known)
            if total != seen.shape[1]:
                raise self._no_grid(seen.shape[1])
        self._steps = self._steps[1], site.clock.step
        return seen[:, : math.prod(self._grid)].transpose(1, 2).unflatten(2, self._grid)

    def _no_grid(self, tokens: int) -> UnsupportedError:
        return UnsupportedError(
            f'StepCache(measure="spectral") on {self.denoiser.adapter.model}: its {tokens} tokens are not those of the '
            'pictures that the call names, so they have no spectrum; use measure="first_block"'
        )

    def compared(self, now: Tensor, before: Tensor) -> Callable[[], list[float]]:
        """Begins to compare the last two steps that were taken; the result is the same on all ranks."""
        then, here = self._steps
        pair = filtered(now, self._noise(here)), filtered(before, self._noise(then))
        return compared(*pair, samples=self.samples, ranks=self.denoiser.shared)

    def _noise(self, step: int) -> float:
        ratio = self.denoiser.clock.noise_ratio(step)
        assert ratio is not None, "a generation whose scheduler does not say it is refused as it begins"
        return ratio


class SpectrumBytes:
    """Predicts the bytes of swapping tokens for channels.

    Args:
        denoiser: the denoiser; one whose input is cut otherwise than into tokens is refused.

    Raises:
        UnsupportedError: ranks hold parts of the input that are no runs of tokens.
    """

    def __init__(self, denoiser: Site) -> None:
        cut = denoiser.cut
        if cut is not None and cut.axis.size > 1 and not isinstance(cut, SequenceParallel):
            raise UnsupportedError(
                f'StepCache(measure="spectral") on {denoiser.adapter.model}: spectra need ranks that hold runs of '
                f"tokens, as with Ulysses or Ring; here they share the model over {cut.axis.name}; "
                'use measure="first_block"'
            )
        self._cut = cut if isinstance(cut, SequenceParallel) else None
        self._tokens, self._channels, self._itemsize = 0, 0, 0

    def note(self, seen: Tensor) -> None:
        """Notes the shape of what the first block gets, `[B, L, C]`."""
        if self._cut is not None:
            self._tokens = sum(self._cut.sizes[IMAGE])
            self._channels, self._itemsize = seen.shape[-1], seen.element_size()

    def predict(self, batch: int, index: int) -> int:
        """Returns the bytes that the rank at `index` of the token axes sends in a step."""
        if self._cut is None:
            return 0
        own, others = self._cut.cut_sizes(self._tokens)[index], self._channels
        return batch * own * (others - split_sizes(others, self._cut.axis.size)[index]) * self._itemsize


def tokens_to_channels(axis: Axis, own: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Swaps parts of the tokens for parts of the channels.

    Args:
        axis: the ranks.
        own: `[B, own L, C]`, this rank's tokens.
        sizes: tokens of each rank.

    Returns:
        `[B, L, own C]`, all tokens for a run of the channels.
    """
    channels = split_sizes(own.shape[-1], axis.size)
    sends = [part.transpose(0, 1).contiguous() for part in own.split(list(channels), dim=-1)]
    whole = own.new_empty(sum(sizes), len(own), channels[axis.index])
    start = offsets(sizes)[axis.index]
    whole[start : start + sizes[axis.index]] = sends[axis.index]
    all_to_all(axis, sends, whole.split(list(sizes)), name="StepCache: tokens to channels").wait()
    return whole.transpose(0, 1)


def filtered(x: Tensor, noise: float) -> Tensor:
    """Keeps of a noisy picture or video what is not noise, frequency by frequency.

    Args:
        x: `[B, C, F, H, W]`.
        noise: noise over signal.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    frames, rows, columns = grid = x.shape[2:]
    spectrum = torch.fft.rfftn(wide, dim=(2, 3, 4))
    return torch.fft.irfftn(
        spectrum * gains((frames, rows, columns), noise, wide)[..., : columns // 2 + 1], s=grid, dim=(2, 3, 4)
    )


def gains(grid: Lengths, noise: float, like: Tensor) -> Tensor:
    """Returns the filter's gain at every frequency, `[F, H, W]`, with a mean of 1.

    Signal of a power-law spectrum S(f) = |f|^-b beside white noise of size r is estimated best, in the least squares,
    by S / (S + r²) of what is seen: Wiener's filter. f counts cycles per token, and b is 2 for pictures and 3 for
    videos. Gains are divided by their mean, so that changes of different steps can be compared.

    Args:
        grid: frames, rows and columns.
        noise: noise over signal, r.
        like: a tensor of the wanted type, where it is wanted.
    """
    squares = [torch.fft.fftfreq(length, dtype=torch.float64).square() for length in grid]
    square = squares[0][:, None, None] + squares[1][:, None] + squares[2]
    power = 1.0 if grid[0] == 1 else 1.5
    gain = 1 / (1 + min(noise, _ALL_NOISE) ** 2 * square**power)
    return (gain / gain.mean()).to(like.device, like.dtype, non_blocking=True)
