"""Thinking with many calls of a language model: engines, calls as a graph, strategies. Loads no torch."""

from partsong.reasoning.answer import Answer, final_number
from partsong.reasoning.budget import Budget, BudgetError, Price
from partsong.reasoning.call import Completion, Message, Parameters, Piece, Request, Usage
from partsong.reasoning.engine import Engine, EngineError
from partsong.reasoning.graph import CallGraph
from partsong.reasoning.journal import Journal
from partsong.reasoning.run import Run
from partsong.reasoning.scripted import Line, ScriptedEngine
from partsong.reasoning.strategies import pdr, self_consistency

__all__ = [
    "Answer",
    "Budget",
    "BudgetError",
    "CallGraph",
    "Completion",
    "Engine",
    "EngineError",
    "Journal",
    "Line",
    "Message",
    "Parameters",
    "Piece",
    "Price",
    "Request",
    "Run",
    "ScriptedEngine",
    "Usage",
    "final_number",
    "pdr",
    "self_consistency",
]
