"""Guesses at the next tokens of texts, and their verification: a text stays that of plain decoding and comes sooner.

What needs no model stands here, for every loop that decodes: trees of guesses, the rules that verify them, when they
pay, and drafters that read the text alone.
"""

from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import Drafter, DrafterKnobs, DraftText, Observation
from partsong.kernels.speculation.jacobi import Jacobi
from partsong.kernels.speculation.match import Match, match
from partsong.kernels.speculation.ngram import Ngram

__all__ = ["Drafter", "DrafterKnobs", "DraftText", "DraftTree", "Jacobi", "Match", "Ngram", "Observation", "match"]
