"""Writes the questions in English."""

from __future__ import annotations

from partsong.evals.parallelbench.drawing import verb_of, written_grid, written_list
from partsong.evals.parallelbench.task import Facts

__all__ = ["ask"]

_SCENE = "These people are waiting in line at a counter, the first of them at the front:"
_ONLY = "Answer with the new line alone, in the same notation."

_ORDERS = {
    "copy": "Write the line down as it is.",
    "reverse": "The line turns round, so that the last becomes the first. Write down the line in reverse order.",
    "sort": "Put the line into alphabetical order by first name, people of one first name by last name.",
    "shuffle": "Put the line into a random order, another one than it has now.",
    "repeat": "Everybody wants {count} tickets. Write each person down {count} times in a row, keeping the order.",
    "insert_index": '"{word}" joins the line and stands at place {place} of the new line, counted from 1.',
    "insert_random": '"{word}" joins the line at a random place, which you choose. All others keep their order.',
    "remove_index": "The person at place {place}, counted from 1, leaves. All others keep their order.",
    "remove_random": "One person leaves. Choose at random who it is; all others keep their order.",
    "replace_index": 'The person at place {place}, counted from 1, gives their place to "{word}".',
    "replace_random": 'One person gives their place to "{word}". Choose at random who it is; all others stay.',
}
_SIGNS = {"+": "plus", "-": "minus", "*": "times"}


def ask(name: str, facts: Facts) -> str:
    """Writes the question of a problem.

    Args:
        name: of the task.
        facts: of the problem.
    """
    verb = verb_of(name)
    match verb:
        case "cumsum":
            return (
                f"Here is a list of numbers: [{', '.join(map(str, facts.numbers))}]\n"
                "Replace each number by the sum of itself and all numbers before it. "
                "Answer with the new list alone, in the same notation."
            )
        case "math_op":
            left, right = facts.numbers
            return f"What is {left} {_SIGNS[facts.sign]} {right}? Answer with the number alone."
        case "domino":
            return (
                f"A domino is a number of two digits, neither of them 0. Lay a chain of {facts.count} dominoes that "
                f"begins with {facts.numbers[0]}, in which each domino begins with the digit the one before it ends "
                "with. Answer with the chain alone, as a list such as [12, 25]."
            )
        case "latin_square":
            size = len(facts.items)
            return (
                f"Fill a square of {size} lines and {size} columns with the symbols {', '.join(facts.items)} so that "
                "each stands once in every line and once in every column. Answer with the square alone, a line of it "
                "per line of text, the symbols with commas between them."
            )
        case "sudoku":
            return (
                "Fill the empty cells, shown as _, of this 4 x 4 sudoku, so that every line, every column and every "
                f"2 x 2 corner has the digits 1 to 4:\n{written_grid(facts.clues)}\n"
                "Answer with the four lines of the filled square alone."
            )
        case _:
            order = _ORDERS[verb].format(word=facts.word, place=facts.place, count=facts.count)
            return f"{_SCENE}\n{written_list(facts.items)}\n{order}\n{_ONLY}"
