"""Describes threads inside one text: where it splits, what each thread sees, where they join. It loads no torch."""

from partsong.reasoning.calls.text_tree import Fork, Part, Piece, flat_text
from partsong.reasoning.threads.formats import FORMATS, Format
from partsong.reasoning.threads.layout import Hidden, ThreadLayout, TokenRun, Tokens, encoded, lay_out, replayed
from partsong.reasoning.threads.parse import Parsed, parse
from partsong.reasoning.threads.render import fork_text, render

__all__ = [
    "FORMATS",
    "Fork",
    "Format",
    "Hidden",
    "ThreadLayout",
    "Parsed",
    "Part",
    "Piece",
    "TokenRun",
    "Tokens",
    "encoded",
    "flat_text",
    "fork_text",
    "lay_out",
    "parse",
    "render",
    "replayed",
]
