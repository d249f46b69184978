"""Follows one trajectory of edits and tests: a program and a test run together, and one of them is mended."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from partsong.reasoning.answers.sandbox import Runner, SandboxOutcome
from partsong.reasoning.calls.answer import Extract
from partsong.reasoning.calls.call import Completion, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.parts import together
from partsong.reasoning.strategies.prompts import Prompts, ask

__all__ = ["CodeLoop", "CodePrompts", "run_test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CodePrompts(Prompts):
    """Holds the prompts of edit loops: for a program, a test, a repair, a distinguishing test, a choice."""

    code: str = (
        "Write a Python program for the task below, complete in one fenced code block. It is to define what the task "
        "asks for, and must not read input or run anything by itself.\n\nTask:\n{question}"
    )
    test: str = (
        "Somebody writes a Python program for the task below. Write a test of it: assert statements that use what the "
        "task says the program defines. The test is put behind the program, so do not define or import it. Reply with "
        "one fenced code block.\n\nTask:\n{question}"
    )
    mend: str = (
        "A program for a task was run together with a test, and this failed. One of the two is wrong. Reply with the "
        "word CODE or TEST, for the one you mend, and with the whole of it in one fenced code block."
        "\n\nTask:\n{question}\n\nProgram:\n{code}\n\nTest:\n{test}\n\nWhat the run said:\n{outcome}"
    )
    duel: str = (
        "Below are a task and several programs for it that behave differently somewhere. Write one test, as assert "
        "statements in one fenced code block, that a right program passes and a wrong one among these does not."
        "\n\nTask:\n{question}{programs}"
    )
    choose: str = (
        "Below are a task, several programs for it, and how they did in tests, which may be wrong themselves. Which "
        "program is right? Reply with its number.\n\nTask:\n{question}{programs}\n\nTests:\n{results}"
    )
    program: str = "\n\nProgram {number}:\n{text}"


async def run_test(runner: Runner, code: str, test: str) -> SandboxOutcome:
    """Runs a program followed by a test; it has passed only if the end of the test was reached."""
    whole = f"{code.rstrip()}\n\n{test.rstrip()}\n"
    # A word no program can know, so that a program that exits with 0 before the test does not count as passed.
    word = f"reached {hashlib.blake2b(whole.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"
    outcome = await runner.run(f"{whole}print({word!r})\n")
    reached = word in outcome.output
    output = outcome.output.replace(word, "").rstrip()
    if outcome.passed and not reached:
        output = f"{output}\nThe program ended before the test did.".lstrip()
    return replace(outcome, passed=outcome.passed and reached, output=output)


@dataclass(slots=True)
class CodeLoop:
    """Writes a program and a test, and mends one or the other until they pass together or `iterations` runs are used.

    `last` names the calls that ended last.
    """

    run: Run
    question: str
    extract: Extract
    runner: Runner
    iterations: int
    prompts: CodePrompts
    parameters: Parameters | None
    number: int
    code: Piece | None = None
    test: Piece | None = None
    passed: bool = False
    runs: int = 0
    last: tuple[str, ...] = field(default=())

    async def follow(self) -> bool:
        """Continues until the test passes or all runs are used; returns whether the test passes.

        Raises:
            BudgetError: the budget is spent; the newest program and test are kept.
        """
        path = (f"trajectory {self.number}",)
        completions = await together(
            self.run.call(ask(prompt, question=self.question), path=(*path, name), parameters=self.parameters)
            for name, prompt in (("code", self.prompts.code), ("test", self.prompts.test))
        )
        self.last = tuple(completion.source for completion in completions if completion is not None)
        self.code, self.test = (self._code_in(completion) for completion in completions)
        while self.runs < self.iterations:
            outcome = await self._run()
            if self.passed or self.runs == self.iterations:
                break
            await self._mend(outcome.report, (*path, f"mend {self.runs}"))
        return self.passed

    async def _run(self) -> SandboxOutcome:
        self.runs += 1
        if self.code is None or self.test is None:
            missing = "program" if self.code is None else "test"
            return SandboxOutcome(passed=False, output=f"There is no {missing} yet.", code=1)
        outcome = await run_test(self.runner, self.code.text, self.test.text)
        self.passed = outcome.passed
        return outcome

    async def _mend(self, report: str, path: tuple[str, ...]) -> None:
        code, test = self.code or "", self.test or ""
        chat = ask(self.prompts.mend, question=self.question, code=code, test=test, outcome=report)
        reply = await self.run.call(chat, path=path, parameters=self.parameters, waits=self.last)
        self.last = (reply.source,)
        mended = self._code_in(reply)
        if mended is not None and reply.text.lstrip("*#` \n").upper().startswith("TEST"):
            self.test = mended
        elif mended is not None:
            self.code = mended

    def _code_in(self, completion: Completion | None) -> Piece | None:
        """Returns the code in a completion; None where it ran out of tokens or has no code."""
        if completion is None or completion.finish != "stop":
            return None
        text = self.extract(completion.text)
        return None if text is None else Piece(text, completion.source)
