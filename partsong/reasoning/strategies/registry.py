"""Finds thinking methods by name and reads them from text, as in ``NAME:key=value,...``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin

from partsong.errors import ArgumentError
from partsong.knobs import check_knobs, read_knobs, type_hints
from partsong.plugins import Registry
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.adaptive_consistency import adaptive_consistency
from partsong.reasoning.strategies.beam_search import beam_search
from partsong.reasoning.strategies.best_of_n import best_of_n
from partsong.reasoning.strategies.compute_optimal import compute_optimal
from partsong.reasoning.strategies.decompose import decompose
from partsong.reasoning.strategies.deepconf import deepconf
from partsong.reasoning.strategies.deepprune import deepprune
from partsong.reasoning.strategies.dvts import dvts
from partsong.reasoning.strategies.edit_test_select import edit_test_select
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.strategies.parallel_probe import parallel_probe
from partsong.reasoning.strategies.particle_filtering import particle_filtering
from partsong.reasoning.strategies.particle_gibbs import particle_gibbs
from partsong.reasoning.strategies.pdr import pdr
from partsong.reasoning.strategies.plan_search import plan_search
from partsong.reasoning.strategies.rsa import rsa
from partsong.reasoning.strategies.self_consistency import self_consistency
from partsong.reasoning.strategies.sequential_refinement import sequential_refinement
from partsong.reasoning.strategies.short_m import short_m
from partsong.reasoning.strategies.single import single
from partsong.reasoning.strategies.skeleton_of_thought import skeleton_of_thought

__all__ = [
    "STRATEGIES",
    "Thinking",
    "ThinkingMethod",
    "adaptive_consistency",
    "beam_search",
    "best_of_n",
    "compute_optimal",
    "decompose",
    "deepconf",
    "deepprune",
    "dvts",
    "edit_test_select",
    "fork_join",
    "knobs_of",
    "parallel_probe",
    "parse_thinking",
    "particle_filtering",
    "particle_gibbs",
    "pdr",
    "plan_search",
    "rsa",
    "self_consistency",
    "sequential_refinement",
    "short_m",
    "single",
    "skeleton_of_thought",
]

#: An asynchronous function ``method(run, question, *, extract, parameters)`` that makes many calls of a model.
ThinkingMethod = Callable[..., Coroutine[Any, Any, Answer]]


def _read(thing: Any) -> ThinkingMethod:
    """Accepts what a plug-in offers if it is an asynchronous function ``method(run, question, *, extract, ...)``."""
    if not inspect.iscoroutinefunction(thing):
        raise TypeError(f"{thing!r} is not an asynchronous function")
    if not {"run", "question", "extract"} <= set(inspect.signature(thing).parameters):
        raise TypeError(f"{thing.__name__} does not take run, question and extract")
    return thing


#: All thinking methods by the names command lines use; those of plug-ins last.
STRATEGIES: Mapping[str, ThinkingMethod] = Registry(
    "partsong.thinking",
    (
        single,
        self_consistency,
        adaptive_consistency,
        best_of_n,
        short_m,
        deepconf,
        deepprune,
        parallel_probe,
        sequential_refinement,
        pdr,
        rsa,
        particle_filtering,
        particle_gibbs,
        beam_search,
        dvts,
        compute_optimal,
        plan_search,
        edit_test_select,
        decompose,
        skeleton_of_thought,
        fork_join,
    ),
    name=lambda method: method.__name__.replace("_", "-"),
    read=_read,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """Holds a thinking method with some of its knobs set; calling it runs it.

    Attributes:
        name: name of the method.
        knobs: the knobs that were set.
        needs: arguments besides `extract` that the method needs and that no text can give, such as a runner.
    """

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    async def __call__(self, run: Run, question: str, *, extract: Extract, **more: Any) -> Answer:
        """Runs the method.

        Args:
            run: makes the calls.
            question: the problem.
            extract: finds the answer in a text.
            **more: further arguments of the method, such as `parameters` or a scorer.

        Raises:
            ArgumentError: the method does not take an argument that is given, or needs one that is not.
        """
        known = inspect.signature(STRATEGIES[self.name]).parameters
        if unknown := [name for name in more if name not in known]:
            raise ArgumentError(f"strategy {self.name} takes no {', '.join(unknown)}; it takes {', '.join(known)}")
        if missing := [name for name in self.needs if name not in more]:
            raise ArgumentError(f"strategy {self.name} needs {', '.join(missing)}, given as an argument")
        return await STRATEGIES[self.name](run, question, extract=extract, **{**self.knobs, **more})


def parse_thinking(text: str) -> Thinking:
    """Reads ``NAME[:key=value,...]``; the keys are knobs of the strategy that are numbers, words or ``8-4-1``.

    Raises:
        ArgumentError: the method, a knob or a value is unknown; names the allowed ones.

    >>> parse_thinking("pdr:schedule=4-2-1,distillation=random-k").knobs["schedule"]
    (4, 2, 1)
    """
    name, values = read_knobs(text, {known: knobs_of(known) for known in STRATEGIES}, "strategy", "strategies")
    strategy = STRATEGIES[name]
    check_knobs(type_hints(strategy), values)
    known = inspect.signature(strategy).parameters
    needs = [k for k, p in known.items() if p.default is p.empty and k not in ("run", "question", "extract")]
    return Thinking(name=name, knobs=values, needs=tuple(needs))


def knobs_of(name: str) -> dict[str, Any]:
    """Returns the types of the knobs of a strategy that text can set, by name."""
    hints = type_hints(STRATEGIES[name])
    kinds = {knob: _text_type(hints.get(knob)) for knob in inspect.signature(STRATEGIES[name]).parameters}
    return {knob: kind for knob, kind in kinds.items() if kind is not None and knob != "question"}


def _text_type(hint: Any) -> Any:
    """Returns the type that the text of a knob is read as; None for knobs that no text can set."""
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) is Sequence:
        return tuple[int, ...] if get_args(hint) == (int,) else None
    return hint if hint in (int, float, bool, str) or get_origin(hint) is Literal else None
