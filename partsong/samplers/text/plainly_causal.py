"""Says which texts can be decoded position by position, with only the token to choose."""

from __future__ import annotations

from partsong.samplers.text.caches import DualCache, PrefixCache, TextCache
from partsong.samplers.text.model import TextModel
from partsong.samplers.text.rule import Rule
from partsong.samplers.text.rules import Entropy, EntropyBound, Factor, Hierarchy, KLStable, LLaDA, Quota, Threshold
from partsong.samplers.text.runner import StockTextModel

__all__ = ["why_not_plainly_causal"]

#: Rules that always take the only available position.
_DECIDING = (Quota, LLaDA, Threshold, Factor, Entropy, EntropyBound, KLStable, Hierarchy)
#: Caches that keep the keys of all decided tokens; without refreshes they are the same for a causal model.
_KEEPING = (PrefixCache, DualCache)


def why_not_plainly_causal(model: TextModel, rule: Rule, cache: TextCache) -> str | None:
    """Returns why a step has more to decide than the next token of every text; None if it has not.

    >>> from types import SimpleNamespace
    >>> from partsong.samplers.text.families import ADAPTERS
    >>> why_not_plainly_causal(SimpleNamespace(adapter=ADAPTERS["mdlm"]), Quota(), PrefixCache())
    "the family 'mdlm' is not causal"
    """
    adapter = model.adapter
    if adapter.noise != "none" or adapter.attention != "causal" or not adapter.shifted:
        return f"the family {adapter.name!r} is not causal"
    if type(model) is not StockTextModel or adapter.transform:
        return f"{type(model).__name__} is not run by stock modules alone"
    if type(rule) not in _DECIDING:
        return f"{type(rule).__name__} does more than decide"
    if type(cache) not in _KEEPING or cache.refresh_every is not None:
        return f"{type(cache).__name__} computes keys again; use cache='prefix' without refreshes"
    return None
