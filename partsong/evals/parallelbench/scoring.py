"""Reads and judges answers; no part of an answer is ever executed."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from partsong import zoo
from partsong.evals.parallelbench.drawing import operation_result, valid_lines, verb_of
from partsong.evals.parallelbench.task import BenchProblem, Facts

__all__ = ["score"]


def score(problem: BenchProblem, text: str) -> dict[str, float]:
    """Judges an answer.

    Args:
        problem: with the question.
        text: the model's answer.

    Returns:
        ``score`` is 1.0 for a valid answer, even among other words, and otherwise 0.0. ``score_strict`` is the same for
        an answer written exactly as the question asks. ``items`` is the fraction that is right: of the places of the
        nearest valid answer, of people (shuffle), of links (domino), of lines and columns (squares), or of digits.

    >>> from partsong.evals.parallelbench import problems
    >>> problem = problems("copy", 1)[0]
    >>> score(problem, f"Sure: {problem.answer}!")
    {'score': 1.0, 'score_strict': 0.0, 'items': 1.0}
    """
    judge = _judge_words if problem.language == "lists" else _JUDGES.get(verb_of(problem.task), _judge_line)
    loose, strict, items = judge(problem, text)
    return {"score": float(loose), "score_strict": float(strict), "items": 1.0 if loose else items}


#: Returns for a problem and a text whether it is valid, whether it is so as written, and the fraction that is right.
_Judge = Callable[[BenchProblem, str], tuple[bool, bool, float]]


# --- lists ------------------------------------------------------------------------------------------------------------


def read_list(text: str) -> list[str]:
    """Reads what is between the last opening bracket and its closing one, or the whole text, cut at commas."""
    inside = text.rpartition("[")[2].partition("]")[0]
    return [item.strip(" \t\n\"'") for item in inside.split(",") if item.strip()]


def read_list_strictly(text: str, kind: type) -> list[str] | None:
    """Reads a JSON list of `kind`; None if the text is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        return None
    return [str(item) for item in value]


def nearest(words: Sequence[str], valid: Iterable[Sequence[str]]) -> float:
    """Returns the largest fraction of places, of the longer text, in which a text agrees with a valid one."""
    fractions = (
        sum(a == b for a, b in zip(words, other, strict=False)) / max(len(words), len(other), 1) for other in valid
    )
    return max(fractions, default=0.0)


def share_kept(words: Sequence[str], items: Sequence[str]) -> float:
    """Returns the fraction of items that are there, each as often as it should be."""
    return sum((Counter(words) & Counter(items)).values()) / max(len(words), len(items), 1)


def _judge_line(problem: BenchProblem, text: str) -> tuple[bool, bool, float]:
    verb, facts = verb_of(problem.task), problem.facts
    loose, strict = read_list(text), read_list_strictly(text, str)
    if verb == "shuffle":
        items = list(facts.items)

        def is_valid(words: list[str] | None) -> bool:
            return words is not None and sorted(words) == sorted(items) and words != items

        return is_valid(loose), is_valid(strict), share_kept(loose, items)
    valid = valid_lines(verb, facts)
    return tuple(loose) in valid, strict is not None and tuple(strict) in valid, nearest(loose, valid)


def _judge_sums(problem: BenchProblem, text: str) -> tuple[bool, bool, float]:
    right = read_list(problem.answer)
    loose, strict = read_list(text), read_list_strictly(text, int)
    return loose == right, strict == right, nearest(loose, [right])


def _judge_domino(problem: BenchProblem, text: str) -> tuple[bool, bool, float]:
    facts = problem.facts
    numbers = re.findall(r"\d+", text.rpartition("[")[2].partition("]")[0])
    loose = [int(number) if len(number) == 2 else 0 for number in numbers]
    strict = read_list_strictly(text, int)
    links = _links(loose, facts)
    whole = len(loose) == facts.count and all(links)
    exact = strict is not None and len(strict) == facts.count and all(_links(list(map(int, strict)), facts))
    return whole, exact, sum(links) / max(facts.count, len(loose))


def _links(chain: Sequence[int], facts: Facts) -> list[bool]:
    """Returns for each domino whether it is valid and fits the one before it."""
    fits = [domino // 10 == before % 10 for before, domino in itertools.pairwise(chain)]
    return [
        11 <= domino <= 99 and domino % 10 != 0 and fit
        for domino, fit in zip(chain, [chain[:1] == [facts.numbers[0]], *fits], strict=False)
    ]


# --- numbers ----------------------------------------------------------------------------------------------------------


def _judge_number(problem: BenchProblem, text: str) -> tuple[bool, bool, float]:
    right = str(operation_result(problem.facts))
    numbers = re.findall(r"-?\d+", re.sub(r"(?<=\d),(?=\d{3})", "", text.replace("\N{MINUS SIGN}", "-")))
    last = numbers[-1] if numbers else ""
    return last == right, text.strip() == right, nearest(last[::-1], [right[::-1]])


# --- squares ----------------------------------------------------------------------------------------------------------


def units_of(rows: Sequence[Sequence[str]], boxes: bool) -> list[tuple[str, ...]]:
    """Returns the lines, the columns and, for a sudoku, the 2 x 2 corners of a square."""
    size = len(rows)
    units = [tuple(row) for row in rows] + [tuple(row[c] for row in rows) for c in range(size)]
    if boxes:
        corners = [(r, c) for r in (0, 2) for c in (0, 2)]
        units += [(*rows[r][c : c + 2], *rows[r + 1][c : c + 2]) for r, c in corners]
    return units


def _judge_square(
    rows: Sequence[Sequence[str]], symbols: Sequence[str], clues: Sequence[str] = (), boxes: bool = False
) -> tuple[bool, float]:
    """Returns whether every unit has all symbols and the clues are kept, and the share of units with all symbols."""
    size = len(symbols)
    if len(rows) != size or any(len(row) != size for row in rows):
        return False, 0.0
    units = units_of(rows, boxes)
    full = [set(unit) == set(symbols) for unit in units]
    cells = [cell for row in rows for cell in row]
    keeps_clues = all(clue in ("", cell) for clue, cell in zip(clues, cells, strict=False))
    return all(full) and keeps_clues, sum(full) / len(full)


def _judge_latin(problem: BenchProblem, text: str) -> tuple[bool, bool, float]:
    symbols = problem.facts.items
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    square = [line for line in lines if set(line) <= set(symbols) and len(line) == len(symbols)][: len(symbols)]
    valid, items = _judge_square(square, symbols)
    return valid, valid and len(lines) == len(symbols) and text.strip() == "\n".join(map(",".join, square)), items


def _judge_sudoku(problem: BenchProblem, text: str) -> tuple[bool, bool, float]:
    lines = [re.sub(r"[ ,|\t]", "", line) for line in text.splitlines()]
    square = [line for line in lines if re.fullmatch(r"[1-4]{4}", line)]
    clues = ["" if clue == 0 else str(clue) for clue in problem.facts.clues]
    valid, items = _judge_square(square, "1234", clues, boxes=True)
    return valid, valid and text.strip() == "\n".join(square), items


# --- the zoo's language -----------------------------------------------------------------------------------------------


def _judge_words(problem: BenchProblem, text: str) -> tuple[bool, bool, float]:
    """Judges an answer in the language of the `lists` models, in which a shuffle may keep the order."""
    lists = zoo.task("lists")
    request, words = lists.parse(problem.question), text.split()
    valid = lists.check(problem.question, text)
    if request.family == "shuffle":
        return valid, valid, share_kept(words, request.items)
    if request.family == "latin":
        size = len(request.items)
        rows = [words[low : low + size] for low in range(0, len(words), size)]
        return valid, valid, _judge_square(rows, request.items)[1]
    return valid, valid, nearest(words, [other.split() for other in lists.support(problem.question)])


_JUDGES: dict[str, _Judge] = {
    "cumsum": _judge_sums,
    "math_op": _judge_number,
    "domino": _judge_domino,
    "latin_square": _judge_latin,
    "sudoku": _judge_sudoku,
}
