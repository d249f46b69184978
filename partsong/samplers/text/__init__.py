"""Decodes text many tokens at a time: one loop serves masked, block-diffusion and causal language models."""

from partsong.samplers.text.any_order import AnyOrderModel, AnyOrderText, decode_any_order
from partsong.samplers.text.block_decoder import BlockDecoder
from partsong.samplers.text.caches import DelayedCache, DualCache, NoCache, PrefixCache, TextCache, VicinityCache
from partsong.samplers.text.decode import Decoded, decode, decode_steps
from partsong.samplers.text.events import Event, Step, TextStream
from partsong.samplers.text.families import ADAPTERS
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.model import TextAdapter, TextModel
from partsong.samplers.text.registry import CACHES, RULES, parse_cache, parse_rule
from partsong.samplers.text.rule import Rule
from partsong.samplers.text.rules import (
    Dependency,
    Entropy,
    EntropyBound,
    Factor,
    Hierarchy,
    KLStable,
    LLaDA,
    Quota,
    Threshold,
)
from partsong.samplers.text.rules_revising import InsertDelete, Renoise, Revoke, SoftTokens, TokenEditing
from partsong.samplers.text.speculative_decoder import SpeculativeDecoder
from partsong.samplers.text.tally import Tally

__all__ = [
    "ADAPTERS",
    "CACHES",
    "RULES",
    "AnyOrderModel",
    "AnyOrderText",
    "BlockDecoder",
    "Decoded",
    "DelayedCache",
    "Dependency",
    "DualCache",
    "Entropy",
    "EntropyBound",
    "Event",
    "Factor",
    "Hierarchy",
    "InsertDelete",
    "KLStable",
    "LLaDA",
    "NoCache",
    "PrefixCache",
    "Quota",
    "Renoise",
    "Revoke",
    "Rule",
    "SoftTokens",
    "SpeculativeDecoder",
    "Step",
    "Tally",
    "TextAdapter",
    "TextCache",
    "TextModel",
    "TextStream",
    "Threshold",
    "TokenEditing",
    "VicinityCache",
    "decode",
    "decode_any_order",
    "decode_steps",
    "load_text_model",
    "parse_cache",
    "parse_rule",
]
