"""Lets a language model think with many calls: engines, a graph of the calls, strategies.

It loads neither torch nor a client of a server: the names of `_LAZY` are looked up when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from partsong.reasoning.calls.answer import Answer, final_number
from partsong.reasoning.calls.budget import Budget, BudgetError, Price
from partsong.reasoning.calls.call import Completion, Message, Parameters, Piece, Request, Usage
from partsong.reasoning.calls.engine import Engine, EngineError
from partsong.reasoning.calls.graph import CallGraph
from partsong.reasoning.calls.journal import Journal
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.scripted import Line, ScriptedEngine
from partsong.reasoning.calls.trace import write_trace
from partsong.reasoning.strategies import STRATEGIES, Thinking, parse_thinking, pdr, self_consistency

if TYPE_CHECKING:
    from partsong.reasoning.answers.checking import MathChecker, Verdict
    from partsong.reasoning.answers.sandbox import Runner, Sandbox
    from partsong.reasoning.cluster import RayEngine
    from partsong.reasoning.hosted import RanksEngine
    from partsong.reasoning.local import LocalEngine
    from partsong.reasoning.remote import OpenAIEngine, Patience, RemoteError

_LAZY = {
    "LocalEngine": "local",
    "MathChecker": "answers.checking",
    "OpenAIEngine": "remote",
    "Patience": "remote",
    "RanksEngine": "hosted",
    "RayEngine": "cluster",
    "RemoteError": "remote",
    "Runner": "answers.sandbox",
    "Sandbox": "answers.sandbox",
    "Verdict": "answers.checking",
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
    "RanksEngine",
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
