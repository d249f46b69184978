"""Thinking with many calls of a language model: engines, calls as a graph, strategies.

Loads no torch and no client of a server: the names of `_LAZY` are looked up on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from partsong.reasoning.answer import Answer, final_number
from partsong.reasoning.budget import Budget, BudgetError, Price
from partsong.reasoning.call import Completion, Message, Parameters, Piece, Request, Usage
from partsong.reasoning.engine import Engine, EngineError
from partsong.reasoning.graph import CallGraph
from partsong.reasoning.journal import Journal
from partsong.reasoning.run import Run
from partsong.reasoning.scripted import Line, ScriptedEngine
from partsong.reasoning.strategies import STRATEGIES, Thinking, parse_thinking, pdr, self_consistency
from partsong.reasoning.trace import write_trace

if TYPE_CHECKING:
    from partsong.reasoning.checking import MathChecker, Verdict
    from partsong.reasoning.cluster import RayEngine
    from partsong.reasoning.local import LocalEngine
    from partsong.reasoning.remote import OpenAIEngine, Patience, RemoteError
    from partsong.reasoning.sandbox import Runner, Sandbox

_LAZY = {
    "LocalEngine": "local",
    "MathChecker": "checking",
    "OpenAIEngine": "remote",
    "Patience": "remote",
    "RayEngine": "cluster",
    "RemoteError": "remote",
    "Runner": "sandbox",
    "Sandbox": "sandbox",
    "Verdict": "checking",
}

__all__ = [
    "STRATEGIES",
    "Answer",
    "Budget",
    "BudgetError",
    "CallGraph",
    "Completion",
    "Engine",
    "EngineError",
    "Journal",
    "Line",
    "LocalEngine",
    "MathChecker",
    "Message",
    "OpenAIEngine",
    "Parameters",
    "Patience",
    "Piece",
    "Price",
    "RayEngine",
    "RemoteError",
    "Request",
    "Run",
    "Runner",
    "Sandbox",
    "ScriptedEngine",
    "Thinking",
    "Usage",
    "Verdict",
    "final_number",
    "parse_thinking",
    "pdr",
    "self_consistency",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
