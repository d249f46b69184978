"""Counts the tokens of a padded stream that each sample has, where a model attends sample by sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.known_values import KnownValues
from partsong.parallel.ranks.shards import offsets

__all__ = ["UnpaddedTokens"]


class UnpaddedTokens:
    """Counts the tokens that each sample has on each rank, and the samples that each attention has served.

    Such a model calls attention once per sample, so that the padding of a shorter text neither attends nor is attended
    to. The length of a rank's share of the text then differs by sample, from all of its tokens to none.

    Attributes:
        counts: for each sample, its tokens on each rank; empty where no mask was cut in this call of the model.
    """

    def __init__(self) -> None:
        self.counts: tuple[tuple[int, ...], ...] = ()
        self._stream = ""
        self._known = KnownValues()  # a generation has the same mask in every step
        self._served: Counter[int] = Counter()

    def clear(self) -> None:
        """Forgets the last call of the model."""
        self.counts = ()
        self._served.clear()

    def note(self, mask: Tensor, stream: str, sizes: tuple[int, ...]) -> None:
        """Counts what a mask keeps.

        Args:
            mask: `[B, L]`, nonzero where a sample has a token of the stream; whole on every rank.
            stream: the stream it belongs to.
            sizes: tokens of each rank, which add up to L.

        Raises:
            UnsupportedError: a token follows one that is left out.
        """
        if mask.is_meta:  # a prediction from shapes only: the most there can be
            self.counts = (sizes,) * len(mask)
        else:
            totals = self._known.of(partial(_tokens_kept, stream=stream), mask, key=stream)
            self.counts = tuple(
                tuple(min(max(total - start, 0), size) for start, size in zip(offsets(sizes), sizes, strict=True))
                for total in totals
            )
        self._stream = stream

    def next_sample(self, layer: int) -> int:
        """Returns the sample that the next call of an attention is for."""
        sample, self._served[layer] = self._served[layer], self._served[layer] + 1
        if sample >= len(self.counts):
            raise UnsupportedError(
                f"attention {layer} was called {sample + 1} times for {len(self.counts)} samples; use the model's "
                "default processor and the native attention backend"
            )
        return sample

    def of_sample(self, sizes: Mapping[str, tuple[int, ...]], sample: int) -> dict[str, tuple[int, ...]]:
        """Returns the tokens of each rank in one sample, by stream.

        Args:
            sizes: tokens of each rank, padding included.
            sample: its number; the samples of other ranks are counted as if they were this rank's.
        """
        return {**sizes, self._stream: self.counts[sample % len(self.counts)]}


def _tokens_kept(mask: Tensor, stream: str) -> list[int]:
    """Counts the tokens that a mask keeps of each sample."""
    kept = (mask != 0).long()
    if not bool((kept.cumprod(dim=1) == kept).all()):
        raise UnsupportedError(
            f"a mask leaves out {stream} tokens in front of others; only padding at the end can be cut: move it there, "
            "or use CfgParallel or DataParallel"
        )
    return kept.sum(dim=1).tolist()
