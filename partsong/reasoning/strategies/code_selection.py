"""Chooses among programs: runs all tests on all of them, writes a few more to distinguish the best, asks the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from partsong.reasoning.calls.answer import Answer, vote_of
from partsong.reasoning.calls.call import Piece
from partsong.reasoning.strategies.code_loop import CodeLoop, run_test
from partsong.reasoning.strategies.parts import answer_in, together
from partsong.reasoning.strategies.prompts import ask, numbered

__all__ = ["select"]


async def select(loops: Sequence[CodeLoop], finalists: int, duels: int, *, spent: bool) -> Answer:
    """Returns the program that the tests and the model prefer; for the numbers see `edit_test_select`.

    If the budget is `spent`, only the tests decide.
    """
    run, extract = loops[0].run, loops[0].extract
    programs = list({loop.code.text: loop.code for loop in reversed(loops) if loop.code is not None}.values())[::-1]
    tests = list(dict.fromkeys(loop.test.text for loop in loops if loop.test is not None))
    passed = [await _passed(loops[0], program, tests) for program in programs]
    details = {"passed": passed, "runs": [loop.runs for loop in loops]}
    if not programs:
        return answer_in(run, "", (), extract, "budget" if spent else "done", valid=False, **details)
    order = sorted(range(len(programs)), key=lambda i: (-passed[i], i))[:finalists]
    best, stopped = [programs[i] for i in order], "budget" if spent else "done"
    chosen, names = best[0], [best[0].source]
    if len(best) > 1 and not spent:
        last = tuple(name for loop in loops for name in loop.last)
        choice = await _duel(loops[0], best, [passed[i] for i in order], len(tests), duels, last)
        if choice is None:
            stopped = "budget"
        else:
            place, name = choice
            chosen, names = best[place], [best[place].source, name]
    # The program was extracted already, so it is the answer.
    return replace(answer_in(run, chosen.text, names, extract, stopped, valid=False, **details), answer=chosen.text)


async def _passed(loop: CodeLoop, program: Piece, tests: Sequence[str]) -> int:
    outcomes = [await run_test(loop.runner, program.text, test) for test in tests]
    return sum(outcome.passed for outcome in outcomes)


async def _duel(
    loop: CodeLoop, best: Sequence[Piece], passed: Sequence[int], tests: int, duels: int, waits: tuple[str, ...]
) -> tuple[int, str] | None:
    """Returns the place of the program the model chooses and the name of that call; None if the budget is spent."""
    shown = numbered(loop.prompts.program, best)
    results: list[str | Piece] = [
        f"Program {i + 1} passed {count} of {tests} tests.\n" for i, count in enumerate(passed)
    ]
    chat = ask(loop.prompts.duel, question=loop.question, programs=shown)
    further = await together(
        loop.run.call(chat, path=("duel",), sample=i, parameters=loop.parameters, waits=waits) for i in range(duels)
    )
    for test in further:
        code = None if test is None else vote_of(test, loop.extract)
        if test is None or code is None:
            continue
        outcomes = [(await run_test(loop.runner, program.text, code)).passed for program in best]
        report = ", ".join(f"program {i + 1} {'passed' if ok else 'failed'}" for i, ok in enumerate(outcomes))
        results += ["\nA further test:\n", Piece(code, test.source), f"\n{report}\n"]
    chat = ask(loop.prompts.choose, question=loop.question, programs=shown, results=results)
    (choice,) = await together([loop.run.call(chat, path=("choose",), parameters=loop.parameters, waits=waits)])
    if choice is None:
        return None
    numbers = [int(word) for word in re.findall(r"\d+", choice.text)]
    place = numbers[-1] - 1 if numbers and 1 <= numbers[-1] <= len(best) else 0
    return place, choice.source
