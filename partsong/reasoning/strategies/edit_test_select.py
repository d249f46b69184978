"""Edit, test, select writes programs with tests, runs and mends them in a loop, and chooses among the survivors."""

from __future__ import annotations

from typing import Annotated

from partsong.knobs import Count, Whole
from partsong.reasoning.answers.sandbox import Runner
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.code_loop import CodeLoop, CodePrompts
from partsong.reasoning.strategies.code_selection import select
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import together

__all__ = ["edit_test_select"]

_PROMPTS = CodePrompts()


@checked
async def edit_test_select(
    run: Run,
    question: str,
    *,
    extract: Extract,
    runner: Runner,
    trajectories: Count = 4,
    iterations: Count = 4,
    finalists: Count = 3,
    duels: Annotated[int, Whole(0)] = 1,
    prompts: CodePrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Writes programs with tests in parallel, mends each by the output of its runs, and selects by running all tests.

    A trajectory writes a program and a test, runs them together, and mends one or the other by the output, until the
    test passes or it has run `iterations` times. Then every test runs on every program. The `finalists` programs that
    pass most tests go on. The model writes `duels` more tests to distinguish them, sees the results, and chooses.

    A program and its test run as one text, the test last, in the `runner`; nothing runs unless one is given.

    Args:
        run: makes the calls.
        question: what the program should do.
        extract: finds a program or a test in a text, such as `final_code`.
        runner: runs programs, such as `Sandbox()`.
        trajectories: programs worked on at the same time.
        iterations: most runs of a trajectory.
        finalists: how many programs the model chooses from.
        duels: tests written to distinguish the finalists.
        prompts: its prompts.
        parameters: how texts are drawn.

    Returns:
        The program. In ``details``, ``passed`` counts the tests each different program passes, and ``runs`` the runs of
        each trajectory.

    Raises:
        ArgumentError: a knob is out of range.

    Source: CodeMonkeys, arXiv 2501.14723.
    """
    loops = [CodeLoop(run, question, extract, runner, iterations, prompts, parameters, i) for i in range(trajectories)]
    ended = await together(loop.follow() for loop in loops)
    return await select(loops, finalists, duels, spent=None in ended)
