"""Edit loops with a runner that pretends, the sandbox with one that does not, and the names of strategies."""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning import Line, Request, Run, ScriptedEngine, final_number
from partsong.reasoning.answers.extract_code import final_code
from partsong.reasoning.answers.sandbox import Sandbox, SandboxOutcome
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import STRATEGIES, Thinking, edit_test_select, parse_thinking
from partsong.reasoning.strategies.code_loop import run_test


class Doubling:
    """Runs no code: a program doubles rightly if it says "times 2", and a test fails those that do not."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def run(self, program: str) -> SandboxOutcome:
        self.seen.append(program)
        word = program.rsplit("print('", 1)[1].split("'")[0]
        good = "times 2" in program or "easy" in program
        return SandboxOutcome(passed=good, output=word if good else "AssertionError", code=0 if good else 1)


def coder(request: Request, draw: random.Random) -> Line:
    """The first trajectory is right at once, the second after one edit, the third mends its test instead."""
    which, kind = request.path[0], request.path[-1]
    code = "times 2" if which == "trajectory 0" or (which == "trajectory 1" and kind == "mend 1") else "plus 2"
    if kind.startswith("mend"):
        fixed = "TEST\n```\neasy\n```" if which == "trajectory 2" else f"**CODE**\n```\n{code} again\n```"
        return Line(text=fixed, tokens=10)
    if kind in ("duel", "choose"):
        return Line(text="```\nassert hard\n```" if kind == "duel" else "Program 2.", tokens=3)
    return Line(text=f"```\n{'assert' if kind == 'test' else code}\n```", tokens=20 if kind == "code" else 15)


def edited(**knobs: Any) -> Any:
    runner = Doubling()
    engine = ScriptedEngine(coder, seconds_per_token=1.0, chunk=1)
    run = Run(engine)
    options = {"extract": partial(final_code, language=None), "runner": runner, "trajectories": 3, **knobs}
    answer, seconds = run_virtual(edit_test_select(run, "Double a number.", **options))
    return answer, run, runner, engine, seconds


def test_programs_are_mended_until_their_tests_pass() -> None:
    answer, run, runner, engine, seconds = edited()
    assert answer.details["runs"] == [1, 2, 2]
    # Two different tests; "times 2" passes both, "plus 2" the easy one.
    assert answer.details["passed"] == [2, 2, 1]
    mend = next(r for r in engine.asked if r.path == ("trajectory 1", "mend 1"))
    assert "plus 2" in mend.messages[0].text and "AssertionError" in mend.messages[0].text
    assert run.graph.nodes["trajectory 1/mend 1#0"].reads == ("trajectory 1/code#0", "trajectory 1/test#0")
    # The second finalist is chosen: the mended program, and the call that chose it.
    assert (answer.answer, answer.calls) == ("times 2 again\n", ("trajectory 1/mend 1#0", "choose#0"))
    assert answer.summary["tokens_critical"] == 20 + 10 + 3 + 3 == seconds
    assert len(runner.seen) == (1 + 2 + 2) + 3 * 2 + 3


def test_one_program_needs_no_choice() -> None:
    answer, _, _, engine, _ = edited(trajectories=1, duels=0)
    assert answer.answer == "times 2\n" and len(engine.asked) == 2
    bound, _, _, _, _ = edited(iterations=1)
    assert bound.details["runs"] == [1, 1, 1]


def sandboxed(program: str, **knobs: Any) -> SandboxOutcome:
    try:
        return asyncio.run(Sandbox(**knobs).run(program))
    except UnsupportedError as error:
        pytest.skip(str(error))


def test_a_program_runs() -> None:
    done = sandboxed("import sys\nprint(6 * 7)\nprint('no', file=sys.stderr)\nsys.exit(3)")
    assert (done.passed, done.code, done.output) == (False, 3, "42\nno\n") or done.output == "no\n42\n"
    assert sandboxed("print({'a', 'b', 'c', 'd'})").output == sandboxed("print({'a', 'b', 'c', 'd'})").output
    failed = sandboxed("1 / 0")
    assert 'File "program.py", line 1' in failed.output and "tmp" not in failed.output
    assert sandboxed("print('x' * 9999)", output_chars=100).output.startswith("x" * 50 + "\n[...]")


def test_a_program_stays_inside(tmp_path: Path) -> None:
    outside = tmp_path / "kept"
    outside.write_text("mine")
    for line in (f"open({str(outside)!r}, 'w')", f"import os; os.remove({str(outside)!r})"):
        done = sandboxed(line)
        assert not done.passed and "Permission" in done.output
    assert outside.read_text() == "mine"
    assert sandboxed("open('here', 'w').write('x'); print(open('here').read())").output == "x\n"
    network = sandboxed("import socket\nsocket.create_connection(('127.0.0.1', 9), 2)")
    assert "unreachable" in network.output
    alone = sandboxed(f"import os\nos.kill({os.getpid()}, 0)")
    assert "No such process" in alone.output


def test_a_program_has_limits() -> None:
    assert "MemoryError" in sandboxed("bytearray(10 ** 9)", memory_mb=200).output
    assert "too large" in sandboxed("open('big', 'wb').write(bytes(3 << 20))", file_mb=1).output
    busy = sandboxed("while True: pass", cpu_seconds=1, seconds=60)
    assert not busy.passed and busy.code == 128 + 9


def test_nothing_outlives_its_time() -> None:
    """A child in a session of its own holds a lock file open; when the program is over, nobody holds it."""
    orphan = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    late = sandboxed(orphan + "print('partsong-test')\ntime.sleep(1000)", seconds=0.8)
    assert (late.passed, late.reason, late.code) == (False, "timeout", None)
    assert late.report.startswith("It did not end in time.")
    sandboxed(orphan)
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"program.py" in _read(p)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_program_that_leaves_early_has_not_passed() -> None:
    sandbox = Sandbox(isolate=False)
    assert asyncio.run(run_test(sandbox, "x = 1", "assert x == 1")).passed
    early = asyncio.run(run_test(sandbox, "raise SystemExit(0)", "assert False"))
    assert not early.passed and "ended before the test" in early.output


@pytest.mark.parametrize("knobs", [{"seconds": 0}, {"memory_mb": 1.5}, {"processes": True}])
def test_limits_that_are_not_positive(knobs: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"Sandbox: {next(iter(knobs))}=.*; use a"):
        Sandbox(**knobs)


def test_a_strategy_as_text() -> None:
    thinking = parse_thinking("pdr:schedule=4-2-1,distillation=random-k,keep=3")
    assert thinking == Thinking(name="pdr", knobs={"schedule": (4, 2, 1), "distillation": "random-k", "keep": 3})
    engine = ScriptedEngine(lambda request, draw: Line(text="7"))
    answer, _ = run_virtual(thinking(Run(engine), "q", extract=final_number))
    assert answer.answer == "7" and len(engine.asked) == 7
    for name in STRATEGIES:
        assert parse_thinking(name).knobs == {}
    # A knob that the text names counts as set, also with its default value: a model's own knobs must not replace it.
    assert parse_thinking("self-consistency:risk=0.05,early_stop=true").knobs == {"risk": 0.05, "early_stop": True}
    assert parse_thinking("edit-test-select").needs == ("runner",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pdf", r"no strategy 'pdf'; did you mean pdr\? The strategies are single, self-consistency"),
        ("pdr:width=3", "pdr has no option 'width'; its options are schedule, distillation, keep, workspace_tokens"),
        ("pdr:prompts=x", "no option 'prompts'"),
        ("pdr:schedule=4-2", "end with 1"),
        ("pdr:schedule=x", "schedule='x' is not numbers such as"),
        ("rsa:population=0", "population=0; use a positive integer"),
        ("deepconf:top=2.0", "top=2.0; use a number above 0 and up to 1"),
        ("deepconf:score=best", "score='best'; use mean, tail, bottom or lowest"),
        ("single:num=1", "its options are none"),
    ],
)
def test_text_that_names_nothing(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        parse_thinking(text)


def test_arguments_no_text_gives() -> None:
    engine = ScriptedEngine(lambda request, draw: Line(text="7"))
    with pytest.raises(ArgumentError, match="edit-test-select needs runner"):
        run_virtual(parse_thinking("edit-test-select")(Run(engine), "q", extract=final_number))
    with pytest.raises(ArgumentError, match="pdr takes no runner; it takes run, question, extract, schedule"):
        run_virtual(parse_thinking("pdr")(Run(engine), "q", extract=final_number, runner=None))
    assert engine.asked == []
