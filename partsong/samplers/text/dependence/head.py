"""Predicts from a masked model's states how much the token at one position tells about another position.

The dependence of positions i and j is the total variation between their tokens drawn together and drawn apart. It is
the same to say: by how much knowing the token at i changes the distribution at j, in total variation, in the mean over
that token. A head learns it from such changes of the model's own distributions (`zoo/recipes/train_dependence.py`).

Source: DEMASK, arXiv 2604.02560. The limit by the doubt of both positions is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partsong.knobs import Count, check_fields

__all__ = ["DependenceHead", "DependenceSettings", "doubt_of", "least_of_pairs"]


def doubt_of(max_prob: Tensor, margin: Tensor) -> Tensor:
    """Bounds what any other position can tell about some: 1 less the squares of their two largest probabilities.

    Knowing all others would turn a distribution p into one token, which is a total variation of 1 - p(token) away from
    it, in the mean the sum of p (1 - p). Whatever is known changes it by no more.

    Args:
        max_prob: the largest probability, of any shape.
        margin: that less the second largest.

    >>> doubt_of(torch.tensor(0.5), torch.tensor(0.0))
    tensor(0.5000)
    """
    return (1 - max_prob.square() - (max_prob - margin).square()).clamp(min=0.0)


def least_of_pairs(doubt: Tensor) -> Tensor:
    """Returns the lesser doubt of each two positions, `[B, K]` to `[B, K, K]`, and 0 for a position with itself."""
    pairs = torch.minimum(doubt[:, :, None], doubt[:, None, :])
    return pairs - torch.diag_embed(pairs.diagonal(dim1=1, dim2=2))


@dataclass(frozen=True, kw_only=True, slots=True)
class DependenceSettings:
    """Describes a head and the model it was trained for.

    Attributes:
        hidden_size: the size of the model's states.
        vocab_size: how many tokens it has.
        width: features of a position.
        rank: numbers that two positions are compared by.

    Raises:
        ArgumentError: one is out of bounds.
    """

    hidden_size: Count
    vocab_size: Count
    width: Count = 96
    rank: Count = 32

    def __post_init__(self) -> None:
        check_fields(self)


class DependenceHead(nn.Module):
    """Predicts the dependence of each two positions from their states: two low-rank projections are multiplied.

    The product gives a share from 0 to 1 of the most that the doubt of the two positions allows. So where the model is
    sure, the head cannot err.

    Args:
        settings: its sizes, and the model it is for.

    >>> head = DependenceHead(DependenceSettings(hidden_size=8, vocab_size=9, width=4, rank=2))
    >>> head(torch.randn(1, 3, 8), torch.full((1, 3), 0.5)).shape
    torch.Size([1, 3, 3])
    """

    def __init__(self, settings: DependenceSettings) -> None:
        super().__init__()
        self.settings = settings
        self.features = nn.Linear(settings.hidden_size + 1, settings.width)
        self.left = nn.Linear(settings.width, settings.rank)
        self.right = nn.Linear(settings.width, settings.rank)
        self.base = nn.Linear(settings.width, 1)

    def forward(self, hidden: Tensor, doubt: Tensor) -> Tensor:
        """Returns the dependences `[B, K, K]`, 0 to 1: symmetric, and 0 for a position with itself.

        Args:
            hidden: `[B, K, C]`, the states that the model's own head reads.
            doubt: `[B, K]`, of the distributions read from them (see `doubt_of`).
        """
        return least_of_pairs(doubt) * self.scores(hidden, doubt).sigmoid().to(doubt)

    def scores(self, hidden: Tensor, doubt: Tensor) -> Tensor:
        """Returns the shares before the sigmoid, `[B, K, K]`, for a loss; arguments as for `forward`."""
        own = self.features.weight.dtype
        normed = F.layer_norm(hidden.to(own), hidden.shape[-1:])
        inside = F.silu(self.features(torch.cat([normed, doubt.to(own)[..., None]], -1)))
        scores = self.left(inside) @ self.right(inside).transpose(1, 2) / self.settings.rank**0.5
        scores = scores + self.base(inside)
        return (scores + scores.transpose(1, 2)) / 2
