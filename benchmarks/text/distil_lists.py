"""Measures students of `lists-mdlm`: ``python benchmarks/text/distil_lists.py --students FOLDER``.

The folder holds what `zoo/recipes/distil_lists.py` exports. For every student it measures valid answers and tokens per
forward beside the teacher's, the area under that curve (AUP), and whether answers that should be random still are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import tyro
from transformers import PreTrainedModel

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.text.aup import aup_board
from partsong import zoo
from partsong.seeds import derive
from partsong_zoo.folders import load_folder
from partsong_zoo.lists.speed import measure_speed, measure_spread
from partsong_zoo.lists.tasks import ListExample, draw

TEACHER = "lists-mdlm"
RULE = "entropy-bound"
#: Tasks whose tokens per forward should rise, with the size of their lists; None draws any size. The largest sizes
#: leave room for it: where most answers are short the teacher decides them in little more than one forward.
GOALS: tuple[tuple[str, int | None], ...] = (
    ("add", None),
    ("chain", None),
    ("sort", None),
    ("add", 3),
    ("chain", 4),
    ("sort", 8),
)
TASKS: tuple[tuple[str, int | None], ...] = (
    *GOALS,
    ("copy", None),
    ("reverse", None),
    ("insert_at", None),
    ("remove_at", None),
    ("replace_at", None),
)
#: Tasks of many answers, by the likeliest tokens: one answer is enough, whose tokens depend on each other.
MANY: tuple[tuple[str, int | None], ...] = (
    ("shuffle", None),
    ("shuffle", 4),
    ("insert_random", None),
    ("remove_random", None),
    ("replace_random", None),
)
#: Tasks of many answers, and the size of the lists whose answers are all counted.
RANDOM = (("shuffle", 4), ("replace_random", 6))
#: The settings of a curve, by rule. Only the goals are measured at all of them.
BOUNDS = tuple(f"entropy-bound:gamma={gamma}" for gamma in (0.0, 0.3, 1.0, 3.0))
SOFT = ("soft-tokens", "soft-tokens:sure=0.6", "soft-tokens:sure=0.6,max_post_steps=3")
#: Two points of accuracy may be lost.
ALLOWED = 0.02

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to measure."""

    students: Path
    """The folder with the students."""
    out: Path = result_path(__file__)
    """Result files without suffix."""
    prompts: int = 100
    """Prompts per task and rule."""
    draws: int = 300
    """Answers drawn to each of the prompts whose answers are counted."""
    seed: int = 12
    """Seed of prompts and draws."""
    workers: int = 1
    """Models that are measured at once, each in a process of its own on one thread. Nothing here is timed."""


def main(config: Config) -> None:
    """Measures and writes the files."""
    students = sorted(path for path in config.students.iterdir() if path.is_dir())
    with ProcessPoolExecutor(config.workers, mp_context=get_context("spawn")) as pool:
        parts = pool.map(partial(_measure, config), [None, *students])
        rows = [row for part in parts for row in part]
    note = (
        "`lists-mdlm`, the teacher, students that `zoo/recipes/distil_lists.py` made in equal steps from each seed; "
        f"{config.prompts} fresh prompts per cell, a canvas of 24 in one block, no cache, likeliest tokens. Tokens are "
        f"those of the answer and its end, so one forward per answer is the most there can be (*ceiling*). A cell is "
        f"the mean over seeds of right answers in percent / tokens per forward, with the least and the most of the "
        f"latter where there are several."
    )
    file_result(config.out, __file__, rows, "Students of lists-mdlm", note, _page(rows, config))


def _measure(config: Config, folder: Path | None) -> list[Row]:
    """Measures a student, which is named METHOD:SEED, or the teacher if there is no folder."""
    torch.set_num_threads(1)
    method, seed = (TEACHER, None) if folder is None else folder.name.rsplit("-", 1)
    model = zoo.load(TEACHER).model if folder is None else load_folder(folder)
    of = {
        "model": method if seed is None else f"{method}:{seed}",
        "method": method,
        "seed": None if seed is None else int(seed),
    }
    return [{**of, **row} for row in (*_speeds(model, config), *_many(model, config), *_spreads(model, config))]


def _asked(family: str, size: int | None, num: int, seed: int) -> list[ListExample]:
    """Draws prompts of one size, or of any."""
    return [draw(family, random.Random(derive(seed, "students", family, number)), size) for number in range(num)]


def _label(family: str, size: int | None) -> str:
    return family if size is None else f"{family} of {size}"


def _speeds(model: PreTrainedModel, config: Config) -> list[Row]:
    """Measures accuracy and tokens per forward of every task."""
    rows: list[Row] = []
    for family, size in TASKS:
        asked = _asked(family, size, config.prompts, config.seed)
        for rule in (RULE, *((*BOUNDS, *SOFT) if (family, size) in GOALS else ())):
            row = measure_speed(model, asked, rule)
            ceiling = row["tokens"] / row["num"]
            rows.append({"part": "speed", "task": _label(family, size), "rule": rule, **row, "ceiling": ceiling})
    return rows


def _many(model: PreTrainedModel, config: Config) -> list[Row]:
    """Measures accuracy and tokens per forward where any of many answers is right."""
    rows: list[Row] = []
    for family, size in MANY:
        row = measure_speed(model, _asked(family, size, config.prompts, config.seed), RULE)
        rows.append(
            {"part": "many", "task": _label(family, size), "rule": RULE, **row, "ceiling": row["tokens"] / row["num"]}
        )
    return rows


def _spreads(model: PreTrainedModel, config: Config) -> list[Row]:
    """Measures which answers are drawn where many are right."""
    rows: list[Row] = []
    for family, size in RANDOM:
        asked = _asked(family, None, config.prompts, config.seed)
        at_large = measure_speed(model, asked, RULE, temperature=1.0, seed=config.seed)
        rows.append({"part": "random", "task": family, "rule": RULE, **at_large})
        for number, example in enumerate(_asked(family, size, 3, config.seed + 1)):
            spread = measure_spread(model, example.prompt, RULE, num=config.draws, seed=config.seed + number)
            rows.append({"part": "spread", "task": family, "rule": RULE, **spread})
    return rows


# --- the page ---------------------------------------------------------------------------------------------------------


def _methods(rows: Sequence[Row]) -> list[str]:
    return [*dict.fromkeys(row["method"] for row in rows)]


def _page(rows: Sequence[Row], config: Config) -> str:
    parts = (
        ("The default rule, entropy-bound", _default_table(rows, "speed", TASKS)),
        ("Any of many answers, by the same rule", _default_table(rows, "many", MANY)),
        (f"The fastest setting within {100 * ALLOWED:.0f} points of the teacher's accuracy", _fastest_table(rows)),
        ("AUP", _aup_table(rows)),
        ("Answers that should stay random, at temperature 1", _random_table(rows, config)),
    )
    return "\n\n".join(f"## {head}\n\n{table}" for head, table in parts)


def _cell(rows: Sequence[Row]) -> str:
    """Shows the mean over seeds of accuracy and speed."""
    speeds = [row["tokens_per_forward"] for row in rows]
    span = f" ({min(speeds):.2f} to {max(speeds):.2f})" if len(rows) > 1 else ""
    return f"{100 * mean(row['accuracy'] for row in rows):.1f} / {mean(speeds):.2f}{span}"


def _default_table(rows: Sequence[Row], part: str, tasks: Sequence[tuple[str, int | None]]) -> str:
    names = [_label(*task) for task in tasks]
    speeds = _of(rows, part=part, rule=RULE)
    ceilings = [max(row["ceiling"] for row in speeds if (row["task"], row["model"]) == (n, TEACHER)) for n in names]
    lines: list[Sequence[object]] = [("*ceiling*", "", *(f"{ceiling:.2f}" for ceiling in ceilings))]
    for method in _methods(speeds):
        mine = [row for row in speeds if row["method"] == method]
        lines.append((method, len({row["model"] for row in mine}), *(_cell(_of(mine, task=name)) for name in names)))
    return markdown_table(("method", "seeds", *names), lines)


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _per_model(rows: Sequence[Row], measure: Callable[[list[Row]], Any]) -> dict[str, list[Any]]:
    """Applies a measure to the rows of every model, and lists its results by method."""
    results: dict[str, list[Any]] = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = _of(rows, model=model)
        results.setdefault(mine[0]["method"], []).append(measure(mine))
    return results


def _fastest_table(rows: Sequence[Row]) -> str:
    """Compares the fastest setting of each student that is accurate enough with the teacher at the default rule."""
    lines: dict[str, list[object]] = {"": ["*ceiling*"]}
    for goal in GOALS:
        speeds = _of(rows, part="speed", task=_label(*goal))
        base = _of(speeds, model=TEACHER, rule=RULE)[0]
        lines[""].append(f"{base['ceiling'] / base['tokens_per_forward']:.2f}x")

        def fastest(mine: list[Row], base: Row = base) -> Row | None:
            enough = [row for row in mine if row["accuracy"] >= base["accuracy"] - ALLOWED]
            return max(enough, key=lambda row: row["tokens_per_forward"], default=None)

        for method, best in _per_model(speeds, fastest).items():
            lines.setdefault(method, [method]).append(_ratios(best, base))
    return markdown_table(("method", *(_label(*goal) for goal in GOALS)), [*lines.values()])


def _ratios(best: Sequence[Row | None], base: Row) -> str:
    """Shows for every seed the accuracy, the speed over the teacher's, and the rule."""
    cells = []
    for row in best:
        if row is None:
            cells.append("none")
            continue
        ratio = row["tokens_per_forward"] / base["tokens_per_forward"]
        cells.append(f"{100 * row['accuracy']:.1f} at **{ratio:.2f}x** `{row['rule']}`")
    return "; ".join(cells)


def _aup_table(rows: Sequence[Row]) -> str:
    lines: dict[tuple[str, str], list[object]] = {}
    kinds = {"entropy-bound": (RULE, *BOUNDS), "soft-tokens": SOFT}
    for goal in GOALS:
        speeds = _of(rows, part="speed", task=_label(*goal))
        curves = {
            (model, kind): [(r["tokens_per_forward"], 100 * r["accuracy"]) for r in of_model if r["rule"] in rules]
            for model in dict.fromkeys(row["model"] for row in speeds)
            for of_model in [_of(speeds, model=model)]
            for kind, rules in kinds.items()
        }
        board = aup_board({"/".join(key): points for key, points in curves.items()})
        for method in _methods(speeds):
            for kind in kinds:
                values = [
                    board["/".join(key)] for key in curves if key[0].partition(":")[0] == method and key[1] == kind
                ]
                span = f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else ""
                lines.setdefault((method, kind), [method, f"`{kind}`"]).append(f"{mean(values):.0f}{span}")
    return markdown_table(("method", "rule", *(_label(*goal) for goal in GOALS)), [*lines.values()])


def _random_table(rows: Sequence[Row], config: Config) -> str:
    """Shows validity and speed at large, and how the answers to three prompts are spread, as means over all."""
    lines: dict[str, list[object]] = {}
    for family, _ in RANDOM:
        at_large, spread = _of(rows, part="random", task=family), _of(rows, part="spread", task=family)
        for method in _methods(at_large):
            mine = _of(spread, method=method)
            seen, expected = (mean(row[key] for row in mine) for key in ("distinct", "expected_distinct"))
            apart, floor = (mean(row[key] for row in mine) for key in ("total_variation", "floor"))
            lines.setdefault(method, [method]).extend(
                (
                    _cell(_of(at_large, method=method)),
                    f"{seen:.1f} of {expected:.1f}",
                    f"{apart:.3f} (even draws {floor:.3f})",
                )
            )
    heads = [
        head
        for family, size in RANDOM
        for head in (f"{family}: valid / speed", f"distinct in {config.draws} draws, of {size}", "TV to uniform")
    ]
    return markdown_table(("method", *heads), [*lines.values()])


if __name__ == "__main__":
    main(tyro.cli(Config))
