"""Decodes text many tokens at a time: one loop serves masked, block-diffusion and causal language models."""

from partsong.samplers.text import rules, rules_revising
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
from partsong.samplers.text.rules import *  # noqa: F403 - every rule that only decides
from partsong.samplers.text.rules_revising import *  # noqa: F403 - every rule that revises
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
    "DualCache",
    "Event",
    "NoCache",
    "PrefixCache",
    "Rule",
    "SpeculativeDecoder",
    "Step",
    "Tally",
    "TextAdapter",
    "TextCache",
    "TextModel",
    "TextStream",
    "VicinityCache",
    "decode",
    "decode_any_order",
    "decode_steps",
    "load_text_model",
    "parse_cache",
    "parse_rule",
]
__all__ += rules.__all__
__all__ += rules_revising.__all__
