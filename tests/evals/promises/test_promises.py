"""``partsong eval promises``: its numbers against plain recounts, resuming, refusals, and the page made of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.promises import PAGE, RESULTS, newest, page
from benchmarks.promises_filed import FILED
from partsong.cli import main
from partsong.errors import ArgumentError
from partsong.evals.promises import suite
from partsong.evals.promises.evidence import Effort, Evidence, Promise, judged, ratio
from partsong.evals.promises.exams import EXAMS, answered
from partsong.evals.promises.pictures import Forecast, Sampled
from partsong.evals.promises.programs import examples_hold
from partsong.evals.promises.rows import PROMISES
from partsong.evals.promises.sums import steps_right
from partsong.evals.promises.thinking import Gain, Saving, Scaling, factor_of
from partsong.reasoning.answers.sandbox import Sandbox

SMALL = Effort(problems=4, samples=2, rounds=1)


def test_every_row_can_be_read() -> None:
    assert len({row.method for row in PROMISES}) == len(PROMISES)
    for row in PROMISES:
        measure = row.measure
        if isinstance(measure, (Gain, Saving, Scaling)):
            for text in (measure.method, measure.than.format(1)):
                EXAMS[measure.family].read(text)
    assert all((RESULTS / f"{row.file}.md").is_file() for row in FILED)


def test_verdicts() -> None:
    assert judged(met=True, helps=True) == "holds"
    assert judged(met=False, helps=True) == "holds in part"
    assert judged(met=False, helps=False) == "not here"


def test_a_ratio_has_an_interval_of_pairs() -> None:
    rng = np.random.default_rng(0)
    under = rng.uniform(1, 9, 400)
    value, low, high = ratio({"a": list(0.5 * under), "b": list(under)}, "a", "b", 0)  # of pairs, the ratio is certain
    assert value == pytest.approx(0.5) and low == pytest.approx(0.5) and high == pytest.approx(0.5)
    value, low, high = ratio({"a": list(0.5 * rng.permutation(under)), "b": list(under)}, "a", "b", 0)
    assert low < value < high and high - low > 0.02


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.5, 0.25, 0.5, 0.75], 20.0 / 10),  # reached at the second point of the curve
        ([0.9, 0.25, 0.5, 0.75], 40.0 / 10),  # never reached: at least its last point
        ([0.1, 0.25, 0.5, 0.75], 10.0 / 10),  # its first point is enough
        ([0.625, 0.25, 0.5, 0.75], np.sqrt(20 * 40) / 10),  # half way, by logarithms
    ],
)
def test_how_far_a_curve_has_to_go(accuracies: list[float], expected: float) -> None:
    assert factor_of(np.array([10.0, 10.0, 20.0, 40.0]), np.array(accuracies)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("question", "text", "right"),
    [
        ("8*25+6+51=?", "8*25=200, 200+6=206, 51+206=257. answer: 257", True),
        ("8*25+6+51=?", "8*25=201, 201+6=207", False),  # wrong product
        ("8*25+6+51=?", "51+6=57, 57+57=114", False),  # a number that is there once
        ("make 21 from 18 13 8 7", "21-8=13", False),  # the target is no number of the question
        ("make 21 from 18 13 8 7", "18-8=10, 13-10=3, 7*3=21: yes. answer: 7*(13-(18-8))", True),
    ],
)
def test_the_check_of_steps(question: str, text: str, right: bool) -> None:
    assert steps_right(question, text) == (0.98 if right else 0.02)


ASKED = """Complete this Python function.

```python
from typing import List

def doubled(numbers: List[int]) -> List[int]:
    \'\'\' Double them.
    >>> doubled([1, 2])
    [2, 4]
    >>> doubled([])
    []
    \'\'\'
```"""


@pytest.mark.parametrize(
    ("body", "holds"),
    [
        ("def doubled(numbers: List[int]):\n    return [2 * number for number in numbers]", True),
        ("def doubled(numbers):\n    return [number + 1 for number in numbers]", False),  # right for 1 only
        ("def doubled(numbers):\n    return [2, 4]", False),  # right for the first example only
        ("raise SystemExit(0)", False),  # ends before the examples
        ("def halved(numbers):\n    return numbers", False),  # the prompt's own function returns nothing
    ],
)
def test_programs_are_chosen_by_the_examples_in_the_prompt(body: str, holds: bool) -> None:
    text = f"Here it is:\n```python\n{body}\n```\nDone."
    assert asyncio.run(examples_hold(Sandbox(isolate=False), ASKED, text)) is holds
    assert not asyncio.run(examples_hold(Sandbox(isolate=False), ASKED, body))  # no fenced block


def test_rows_of_thinking_are_recounted(tmp_path: Path) -> None:
    """Both sides of a row, counted anew from the outcomes on disk; a second run answers nothing."""
    row = Saving(method="self-consistency:num=2", than="self-consistency:num=4", share=0.6, points=100)
    found = row(SMALL, tmp_path)
    lines = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        for path in (tmp_path / f"countdown-4-self-consistency-num-{num}.jsonl" for num in (2, 4))
    ]
    totals = [sum(line["counts"]["tokens_total"] for line in side) for side in lines]
    assert found.value == pytest.approx(totals[0] / totals[1]) and found.verdict == "holds"
    assert len(lines[0]) == len({line["number"] for line in lines[0]}) == 4
    asked = {problem.question for problem in EXAMS["countdown"].problems("countdown", SMALL)}
    assert len(asked) == 4 and all(text.startswith("make ") for text in asked)
    again = answered("countdown", ["self-consistency:num=2"], SMALL, tmp_path)
    kept = sorted(lines[0], key=lambda line: line["number"])  # lines stand in the order in which they were finished
    assert [outcome.as_json() for outcome in again["self-consistency:num=2"]] == kept


@pytest.mark.full
@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row.method)
def test_every_row_in_small(row: Promise, tmp_path: Path) -> None:
    found = row.measure(SMALL, tmp_path)
    assert found.low <= found.value <= found.high or isinstance(row.measure, Scaling)
    assert np.isfinite([found.value, found.low, found.high]).all()
    assert found.measured and found.cost


def test_bytes_are_those_of_the_planner(tmp_path: Path) -> None:
    from partsong.planner import advise, machine_named, subject_named
    from partsong.samplers.registry import parse_strategy

    row = Forecast(model="flux-dev", strategy="ring", than="ulysses", gpus="2x4090", counts="bytes_sent", share=1.5)
    found = row(SMALL, tmp_path)
    mixes = [(parse_strategy("ring"),), (parse_strategy("ulysses"),)]
    rows = advise(
        subject_named("flux-dev"), machine_named("2x4090", "pcie4", memory=1e15), only=mixes, max_drift=1.0
    ).rows
    sent = {row.strategy: row.bytes_sent for row in rows}
    assert found.value == sent["ring"] / sent["ulysses"] == found.low == found.high


def test_a_failing_command_is_named(tmp_path: Path) -> None:
    from partsong.errors import DistributedError

    row = Sampled(command="image", model="shapes", strategy="no-such", factor=1)
    with pytest.raises(DistributedError, match="partsong image --strategy no-such: .*no-such"):
        row(SMALL, tmp_path)


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def row(name: str, *, stops: bool = False) -> Promise:
        def measure(effort: Effort, work: Path) -> Evidence:
            calls.append(name)
            if stops and calls.count(name) == 1:
                raise KeyboardInterrupt
            return Evidence(value=1.0, low=0.5, high=2.0, measured="1x", cost="1 s", verdict="holds")

        return Promise(method=name, paper="p", promise="q", setting="s", measure=measure)

    rows = [row("one"), row("two", stops=True), row("three")]
    with pytest.raises(KeyboardInterrupt):
        suite.measure_promises(rows, SMALL, tmp_path)
    found = suite.measure_promises(rows, SMALL, tmp_path)
    assert calls == ["one", "two", "two", "three"] and [line["method"] for line in found] == ["one", "two", "three"]
    with pytest.raises(ArgumentError, match="problems"):
        suite.measure_promises(rows, Effort(**{**asdict(SMALL), "problems": 5}), tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--methods", "token-ring", "--work", str(tmp_path / "w"), "--json", str(tmp_path / "r.json")]
    with pytest.raises(SystemExit) as caught:
        main(["eval", "promises", *asked])
    assert caught.value.code == 0
    result = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (result["command"], result["suite"]) == ("eval", "promises")
    assert [row["method"] for row in result["rows"]] == ["token-ring"] and result["rows"][0]["paper"]
    assert "token-ring" in capsys.readouterr().out


def test_unknown_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no promise of 'deeprune'.*did you mean.*deepprune"):
        suite.chosen(["deeprune"])
    assert [row.method for row in suite.chosen(["ulysses"])] == ["ulysses", "ulysses on two ranks"]


def test_the_page_is_made_from_its_file() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    rows = json.loads(newest().read_text(encoding="utf-8"))["rows"]
    assert {row["method"] for row in rows} <= {row.method for row in PROMISES}
