"""Makes problems whose answers are programs, judged by running the benchmark's own tests.

A problem of LiveCodeBench reads from standard input, or completes a function; its hidden tests are packed. They are
unpacked without running anything that a file names.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from partsong.errors import ArgumentError
from partsong.evals.reasoning.judges import ends_well, passes
from partsong.evals.reasoning.problem import Problem
from partsong.reasoning.answers.extract_code import final_code
from partsong.reasoning.answers.sandbox import Runner

__all__ = ["human_eval", "live_code", "mbpp", "packed_tests"]

_COMPLETE = (
    "Complete this Python function. Answer with the whole function in one fenced block.\n\n```python\n{prompt}```"
)
_MBPP = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}"
    "\n\nAnswer with the code in one fenced block."
)
_READS = "Write a Python program that reads standard input and writes to standard output"
_STARTS = "Complete this Python code:\n\n```python\n{starter}\n```"
_LIVE = "{question}\n\n{form}. Answer with the whole program in one fenced block."

#: Runs a program on an input and compares what it writes, line by line, numbers by their value.
_STDIN = """
import io, sys
from decimal import Decimal, InvalidOperation

def lines(text):
    return [line.split() for line in text.strip().splitlines()]

def same(a, b):
    try:
        return a == b or Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False

sys.stdin = io.TextIOWrapper(io.BytesIO({given!r}.encode()))
sys.stdout = written = io.TextIOWrapper(io.BytesIO(), write_through=True)
try:
    exec(compile({code!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except SystemExit as end:
    if end.code not in (None, 0):
        raise
found, right = lines(written.buffer.getvalue().decode()), lines({wanted!r})
equal = [len(x) == len(y) and all(map(same, x, y)) for x, y in zip(found, right)]
assert len(found) == len(right) and all(equal)
"""
#: Calls a function, or the method of a class called Solution, and compares what it returns.
_CALL = """
import json
from typing import *

space = {{"__name__": "program", **{{name: thing for name, thing in globals().items() if name[0] != "_"}}}}
exec(compile({code!r}, "program.py", "exec"), space)
given = [json.loads(line) for line in {given!r}.splitlines() if line.strip()]
function = getattr(space["Solution"](), {name!r}) if "Solution" in space else space[{name!r}]
found = json.loads(json.dumps(function(*given)))
assert found == json.loads({wanted!r})
"""


def human_eval(task: str, number: int, row: Mapping[str, Any], runner: Runner) -> Problem:
    """Asks for a function, which is right if the benchmark's tests run after it without an error."""
    tests = f"\n\n{row['test']}\n\ncheck({row['entry_point']})\n"
    return Problem(
        task=task,
        number=number,
        question=_COMPLETE.format(prompt=row["prompt"]),
        gold=row["prompt"] + row["canonical_solution"],
        # The prompt comes first because of its imports; an answer that repeats them does no harm.
        check=partial(ends_well, before=f"{row['prompt']}    pass\n\n", after=tests, runner=runner),
        extract=final_code,
        facts={"name": row["task_id"]},
    )


def mbpp(task: str, number: int, row: Mapping[str, Any], runner: Runner) -> Problem:
    """Asks for a function that passes the tests it is shown; reads rows of the full and of the sanitized form."""
    shown = "\n".join(row["test_list"])
    imports = "\n".join([*row.get("test_imports", ()), row.get("test_setup_code") or ""])
    return Problem(
        task=task,
        number=number,
        question=_MBPP.format(text=row["text"] if "text" in row else row["prompt"], tests=shown),
        gold=row["code"],
        check=partial(ends_well, before=f"{imports}\n", after=f"\n\n{shown}\n", runner=runner),
        extract=final_code,
        facts={"name": row["task_id"]},
    )


def live_code(task: str, number: int, row: Mapping[str, Any], runner: Runner) -> Problem:
    """Asks for a program, or the rest of one that is begun, and runs public and hidden tests on it.

    Raises:
        ArgumentError: the tests cannot be read.
    """
    tests = [*packed_tests(row["public_test_cases"]), *packed_tests(row["private_test_cases"])]
    starter, meta = row.get("starter_code") or "", json.loads(row.get("metadata") or "{}")
    return Problem(
        task=task,
        number=number,
        question=_LIVE.format(
            question=row["question_content"].strip(), form=_STARTS.format(starter=starter) if starter else _READS
        ),
        gold=starter,
        check=partial(_passes, tests=tests, name=meta.get("func_name", ""), runner=runner),
        extract=final_code,
        facts={"name": row["question_id"]},
    )


class _Plain(pickle.Unpickler):
    """Reads plain data, and refuses to look up anything by name."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and only plain data is read")


def packed_tests(text: str) -> list[dict[str, str]]:
    """Reads tests, each with ``input``, ``output`` and ``testtype``: JSON, or JSON that is pickled, packed and encoded.

    Raises:
        ArgumentError: it is neither, or names something that would have to be run.

    >>> packed_tests('[{"input": "1", "output": "2", "testtype": "stdin"}]')[0]["output"]
    '2'
    """
    try:
        if not text.lstrip().startswith("["):
            text = _Plain(io.BytesIO(zlib.decompress(base64.b64decode(text, validate=True)))).load()
        return json.loads(text)
    except (ValueError, TypeError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        raise ArgumentError(f"tests of a program cannot be read: {error}") from None


def _passes(code: str | None, *, tests: Sequence[Mapping[str, str]], name: str, runner: Runner) -> bool:
    """Says whether a program passes all tests; the first that fails ends it."""
    if code is None:
        return False
    for test in tests:
        form = _STDIN if test["testtype"] == "stdin" else _CALL
        program = form.format(code=code, given=test["input"], wanted=test["output"], name=name)
        if not passes(program, runner):
            return False
    return True
