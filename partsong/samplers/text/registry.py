"""Finds rules and caches by name, for command lines and reports."""

from __future__ import annotations

from partsong.knobs import by_name, parse_knobs
from partsong.samplers.text import rules, rules_revising
from partsong.samplers.text.caches import DelayedCache, DualCache, NoCache, PrefixCache, TextCache, VicinityCache
from partsong.samplers.text.rule import Rule

__all__ = ["CACHES", "RULES", "parse_cache", "parse_rule"]

#: Rule classes by name; `LLaDA` is ``llada``.
RULES = {
    **by_name((rules.EntropyBound, rules.VariationBound, rules.Quota, rules.Threshold, rules.Factor, rules.Entropy)),
    **by_name((rules.KLStable, rules.Hierarchy, rules.Dependency, rules_revising.Revoke, rules_revising.TokenEditing)),
    **by_name((rules_revising.SoftTokens, rules_revising.InsertDelete, rules_revising.Renoise)),
    "llada": rules.LLaDA,
}

#: Cache classes by name, without "cache": ``none``, ``prefix`` ...
CACHES = {"none": NoCache, "prefix": PrefixCache, "dual": DualCache, "delayed": DelayedCache, "vicinity": VicinityCache}


def parse_rule(text: str) -> Rule:
    """Reads a rule from ``NAME[:key=value,...]``.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.

    >>> parse_rule("entropy-bound:gamma=0.5")
    EntropyBound(gamma=0.5)
    """
    return parse_knobs(text, RULES, "rule")


def parse_cache(text: str) -> TextCache:
    """Reads a cache from ``NAME[:key=value,...]``; errors as in `parse_rule`.

    >>> parse_cache("prefix:refresh_every=4")
    PrefixCache(refresh_every=4, refresh_blocks=True)
    """
    return parse_knobs(text, CACHES, "cache")
