"""What counts as right here and in lm-eval's own tasks: the same, but where only the spelling differs."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from partsong.evals.reasoning.datasets import load_jsonl
from partsong.evals.reasoning.problem import Problem
from partsong.evals.reasoning.published import load_published

GSM8K = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "48+24=72\n#### 72",
}
LARGE = {"question": "How much is a house?", "answer": "80000+50000=130000\n#### 130,000"}
#: Texts, the row they answer, and whether they are right.
GRADE_SCHOOL: tuple[tuple[str, dict[str, str], bool], ...] = (
    ("48/2 = 24 in May.\n48 + 24 = 72\n#### 72", GSM8K, True),
    ("In May she sold 24, so 48 + 24 = 72.", GSM8K, True),
    ("The answer is \\boxed{72}.", GSM8K, True),
    ("The answer is 72 clips", GSM8K, True),
    ("Half of 48 is 24. The answer is 24.", GSM8K, False),
    ("I do not know.", GSM8K, False),
    ("#### -72", GSM8K, False),
    ("48 + 24 = 73, so 73.", GSM8K, False),
    ("#### 130,000", LARGE, True),
    ("It costs $130,000", LARGE, True),
    ("130000", LARGE, True),
    ("#### 13,000", LARGE, False),
)
#: Right here, and wrong there, where the spelling of a number counts.
SPELLED = (("The answer is 72.0", GSM8K), ("#### 130000.00", LARGE), ("That makes 7.2e1", GSM8K))
CONTEST = {"problem": "Find the remainder when 1204 is divided by 1000.", "answer": "204"}
CONTESTS = (
    ("so the remainder is \\boxed{204}", True),
    ("first \\boxed{203}, no: \\boxed{204}.", True),
    ("\\boxed{1204}", False),
    ("\\boxed{ 204 }", True),
    ("\\boxed{2}", False),
)
MATHS = (
    ("\\frac{3}{4}", "$\\frac{3}{4}$", True),
    ("\\frac{3}{4}", "$\\dfrac34$", True),
    ("\\frac{3}{4}", "$3/4$", True),
    ("\\frac{3}{4}", "$\\frac{4}{3}$", False),
    ("2\\sqrt{2}", "$2\\sqrt2$", True),
    ("2\\sqrt{2}", "$\\sqrt{6}$", False),
    ("(1,2)", "$(1, 2)$", True),
    ("(1,2)", "$(2,1)$", False),
)
#: Equal formulas that are spelled in another way: right here, and wrong where spellings are compared.
EQUAL = (("\\frac{3}{4}", "$0.75$"), ("x^2+2x+1", "$(x+1)^2$"), ("2\\sqrt{2}", "$\\sqrt{8}$"))


@cache
def grade_school_task() -> Any:
    """lm-eval's task with its own filters and metric, on no data of the hub."""
    from lm_eval import tasks
    from lm_eval.api.task import ConfigurableTask

    path = Path(tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = Path(__file__).parent / "gsm8k_rows.jsonl"
    del config["dataset_name"], config["training_split"], config["fewshot_split"]
    config |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}, "num_fewshot": 0}
    return ConfigurableTask(config=config)


def there(row: dict[str, str], text: str) -> bool:
    """What lm-eval says of an answer, by the last number in it."""
    from lm_eval.api.instance import Instance

    task = grade_school_task()
    (flexible,) = (each for each in task._filters if each.name == "flexible-extract")
    asked = Instance("generate_until", doc=row, arguments=("", {}), idx=0)
    asked.resps = [text]
    flexible.apply([asked])
    return task.process_results(row, [asked.filtered_resps["flexible-extract"]])["exact_match"] == 1


def here(problem: Problem, text: str) -> bool:
    return problem.check(problem.extract(text))


def grade_school(row: dict[str, str], folder: Path) -> Problem:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({**row, "answer": row["answer"].rpartition("#### ")[2]}))
    return load_jsonl(path)[0]


@pytest.mark.parametrize(("text", "row", "is_right"), GRADE_SCHOOL)
def test_grade_school_problems(text: str, row: dict[str, str], is_right: bool, tmp_path: Path) -> None:
    assert here(grade_school(row, tmp_path), text) == there(row, text) == is_right


@pytest.mark.parametrize(("text", "row"), SPELLED)
def test_a_number_counts_however_it_is_spelled(text: str, row: dict[str, str], tmp_path: Path) -> None:
    assert here(grade_school(row, tmp_path), text) and not there(row, text)


@pytest.mark.parametrize(("text", "is_right"), CONTESTS)
def test_contests(text: str, is_right: bool, tmp_path: Path) -> None:
    theirs = importlib.import_module("lm_eval.tasks.aime.utils")
    (tmp_path / "aime-2024.jsonl").write_text(json.dumps(CONTEST))
    (problem,) = load_published("aime-2024", data=tmp_path)
    assert here(problem, text) == bool(theirs.process_results(CONTEST, [text])["exact_match"]) == is_right


def formula(gold: str, text: str, folder: Path) -> tuple[bool, bool]:
    """What is said here, and by lm-eval's task, of an answer in dollar signs."""
    theirs = importlib.import_module("lm_eval.tasks.hendrycks_math.utils")
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"question": "What is it?", "answer": gold}))
    (problem,) = load_jsonl(path, kind="math")
    found = theirs.process_results({"solution": f"So it is $\\boxed{{{gold}}}$."}, [text])
    return here(problem, text), bool(found["exact_match"])


@pytest.mark.parametrize(("gold", "text", "is_right"), MATHS)
def test_formulas(gold: str, text: str, is_right: bool, tmp_path: Path) -> None:
    assert formula(gold, text, tmp_path) == (is_right, is_right)


@pytest.mark.parametrize(("gold", "text"), EQUAL)
def test_a_formula_counts_however_it_is_spelled(gold: str, text: str, tmp_path: Path) -> None:
    assert formula(gold, text, tmp_path) == (True, False)
