"""Sorts encoded pictures into clusters, one for each expert, by k-means of their mean latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partsong.errors import ArgumentError
from partsong_zoo.shapes.scenes import generator

__all__ = ["Clusters", "find_clusters"]

#: Numbers per picture, `[pictures, features]`.
Features = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Clusters:
    """Holds the centres of clusters.

    Attributes:
        mean: Mean of every feature, `[features]`.
        scale: Its standard deviation, `[features]`.
        centres: Of the features with zero mean and unit variance, `[clusters, features]`; the largest cluster first.
    """

    mean: Features
    scale: Features
    centres: Features

    def labels(self, latents: NDArray[Any]) -> NDArray[np.int64]:
        """Returns the cluster of every picture from latents `[pictures, channels, rows, columns]`."""
        return _nearest((_features(latents) - self.mean) / self.scale, self.centres)


def find_clusters(latents: NDArray[Any], num: int, *, seed: int, tries: int = 8) -> Clusters:
    """Finds clusters of pictures: k-means on the mean of each latent channel, the best of several beginnings.

    Args:
        latents: Encoded pictures, `[pictures, channels, rows, columns]`.
        num: How many clusters.
        seed: Of the beginnings.
        tries: How many of them.

    Raises:
        ArgumentError: There are fewer pictures than clusters.

    Source: k-means++, Arthur and Vassilvitskii 2007.
    """
    if len(latents) < num:
        raise ArgumentError(f"{len(latents)} pictures make no {num} clusters; encode more pictures or ask for fewer")
    raw = _features(latents)
    mean, scale = raw.mean(axis=0), raw.std(axis=0) + 1e-6
    features = (raw - mean) / scale
    results = (_k_means(features, num, generator(seed, trial)) for trial in range(tries))
    centres = min(results, key=lambda each: _spread(features, each))
    sizes = np.bincount(_nearest(features, centres), minlength=num)
    return Clusters(mean=mean, scale=scale, centres=centres[np.argsort(-sizes, kind="stable")])


def _features(latents: NDArray[Any]) -> Features:
    return latents.astype(np.float64).mean(axis=(2, 3))


def _distances(features: Features, centres: Features) -> Features:
    return np.square(features[:, None] - centres[None]).sum(axis=-1)


def _nearest(features: Features, centres: Features) -> NDArray[np.int64]:
    return _distances(features, centres).argmin(axis=1)


def _spread(features: Features, centres: Features) -> float:
    return float(_distances(features, centres).min(axis=1).sum())


def _k_means(features: Features, num: int, rng: np.random.Generator) -> Features:
    """Finds centres from one beginning: points drawn far apart, then means of the nearest until they stay."""
    centres = features[rng.integers(len(features))][None]
    while len(centres) < num:
        weights = _distances(features, centres).min(axis=1) + 1e-12
        chosen = rng.choice(len(features), p=weights / weights.sum())
        centres = np.concatenate([centres, features[chosen][None]])
    for _ in range(100):
        labels = _nearest(features, centres)
        members = [features[labels == each] for each in range(num)]
        moved = np.stack([own.mean(axis=0) if len(own) else centres[each] for each, own in enumerate(members)])
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres
