"""Ways to think with many calls: each is one async function over a `Run`."""

from partsong.reasoning.strategies.pdr import pdr
from partsong.reasoning.strategies.self_consistency import self_consistency

__all__ = ["pdr", "self_consistency"]
