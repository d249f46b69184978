"""Guesses the next tokens of texts and verifies them: the text equals that of plain decoding and comes sooner.

The parts here need no model and serve every decoding loop: trees of guesses, the rules that verify them, when they pay
off, and drafters that read only the text.
"""

from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import Drafter, DrafterKnobs, DraftText, Observation
from partsong.kernels.speculation.jacobi import Jacobi
from partsong.kernels.speculation.match import Match, match
from partsong.kernels.speculation.ngram import Ngram

__all__ = ["Drafter", "DrafterKnobs", "DraftText", "DraftTree", "Jacobi", "Match", "Ngram", "Observation", "match"]
