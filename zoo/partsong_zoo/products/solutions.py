"""Works out products and countdowns, in threads or, as the same work, one thread after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from partsong.reasoning.calls.text_tree import Part, Piece
from partsong.reasoning.threads.formats import Format
from partsong.reasoning.threads.parse import parse
from partsong.reasoning.threads.render import fork_text
from partsong_zoo.products.problems import ANSWER, ProductProblem

__all__ = ["Thread", "ProductWork", "in_sequence", "in_threads", "work_out"]


@dataclass(frozen=True, slots=True)
class Thread:
    """Holds a part of the work that needs no other part.

    Attributes:
        goal: what it is about, for a reader of the question.
        task: the same for a reader who does not see the question.
        steps: the work.
        result: the result.
    """

    goal: str
    task: str
    steps: str
    result: str

    @property
    def text(self) -> str:
        """Returns the steps and the result."""
        return f"{self.steps};{self.result}"


@dataclass(frozen=True, slots=True)
class ProductWork:
    """Holds a worked solution.

    Attributes:
        begin: the text before the threads.
        threads: the parts that can be worked out side by side.
        together: the text that follows from all of them.
        answer: the answer.
    """

    begin: str
    threads: tuple[Thread, ...]
    together: str
    answer: str


def work_out(problem: ProductProblem) -> ProductWork:
    """Works out a problem, always in the same way.

    A product has the numbers backwards, a thread per digit of the second number, and the sums of the columns. A
    countdown has a thread per pair of numbers to begin with.

    >>> from partsong_zoo.products.problems import parse
    >>> work = work_out(parse("47*38=?"))
    >>> work.begin, [(thread.goal, thread.task, thread.text) for thread in work.threads]
    ('74*83', [('8', '74*8', '8*7=56,4=37;673'), ('3', '74*03', '3*7=21,4=14;0141')])
    >>> work.together, work.answer
    ('06,08,07,01', '1786')
    """
    return _product(*problem.numbers) if problem.family == "product" else _countdown(problem.numbers, problem.target)


def _product(first: int, second: int) -> ProductWork:
    left, right = str(first)[::-1], str(second)[::-1]
    threads = [_row(left, digit, place) for place, digit in enumerate(right)]
    columns, carry = [], 0
    for place in range(len(left) + len(right)):
        carry = carry // 10 + sum(int(row.result[place]) for row in threads if place < len(row.result))
        columns.append(f"{carry:02d}")
    return ProductWork(f"{left}*{right}", tuple(threads), ",".join(columns), str(first * second))


def _row(left: str, digit: str, place: int) -> Thread:
    """Multiplies a factor, backwards, by one digit: each step's value with its carry, then zeros and the digits."""
    steps, digits, carry = [], "", 0
    for other in left:
        value = int(other) * int(digit) + carry
        steps.append(f"{other}={value:02d}")
        carry, digits = value // 10, digits + str(value % 10)
    zeros = "0" * place
    return Thread(digit, f"{left}*{zeros}{digit}", f"{digit}*{','.join(steps)}", f"{zeros}{digits}{carry}")


def _countdown(numbers: Sequence[int], target: int) -> ProductWork:
    threads = []
    for i, j in combinations(range(len(numbers)), 2):
        (rest,) = (number for place, number in enumerate(numbers) if place not in (i, j))
        text, hit = _tries(numbers[i], numbers[j], rest, target)
        goal = f"{numbers[i]} {numbers[j]}"
        threads.append(Thread(goal, f"{goal} {rest}:{target}", text, hit or "none"))
    hits = [thread.result for thread in threads]
    together = ",".join(str(number) for number, hit in enumerate(hits, 1) if hit != "none") or "none"
    return ProductWork("", tuple(threads), together, next((hit for hit in hits if hit != "none"), "none"))


def _tries(a: int, b: int, rest: int, target: int) -> tuple[str, str]:
    """Lists all values of three numbers that begin with one pair, and the first expression that hits the target."""
    texts, hit = [], ""
    for value, start in _values(a, b):
        ends = []
        for end, expression in _values(value, rest, start):
            ends.append(f"{end}")
            hit = hit or (expression if end == target else "")
        texts.append(f"{start}={value}:{' '.join(ends)}")
    return ",".join(texts), hit


def _values(a: int, b: int, text: str = "") -> list[tuple[int, str]]:
    """Lists sum, difference and product, larger number first, with their expressions; `text` is that of `a`."""
    (high, above), (low, below) = sorted(((a, text or str(a)), (b, str(b))), reverse=True)

    def bracket(expression: str) -> str:
        return f"({expression})" if set(expression) & set("+-") else expression

    return [
        (high + low, f"{above}+{below}"),
        (high - low, f"{above}-{bracket(below)}"),
        (high * low, f"{bracket(above)}*{bracket(below)}"),
    ]


def in_threads(work: ProductWork, form: Format) -> tuple[Part, ...]:
    """Writes the work as a model that thinks in threads does.

    Args:
        work: the work of a problem.
        form: a row of `FORMATS`.

    Returns:
        The parts after the question, as `parse` reads them: what the model writes is in pieces.

    >>> from partsong.reasoning.threads import FORMATS, flat_text
    >>> from partsong_zoo.products.problems import parse
    >>> text = flat_text(in_threads(work_out(parse("12*3=?")), FORMATS["npr"]))
    >>> text.replace(chr(10), "")
    '21*3<guideline><plan>1: 3</plan></guideline><step>1:3*2=06,1=03;630</step><takeaway>06,03,00</takeaway>answer: 36'
    """
    goals = [thread.task if form.apart else thread.goal for thread in work.threads]
    texts = [f"{thread.steps};" if form.apart else thread.text for thread in work.threads]
    returned = [thread.result for thread in work.threads] if form.apart else []
    fork = fork_text(form, goals, texts, work.together, returned)
    # A format that does not announce threads begins with them.
    begin = work.begin if form.announce else ""
    between = "" if form.end else "."
    tree = parse(f"{begin}{fork}{between}{_last(work)}", form)
    assert not tree.notes, tree.notes
    return tree.parts


def in_sequence(work: ProductWork) -> tuple[Part, ...]:
    """Writes the same work one thread after the other, without plan or tags, to compare the other form with.

    >>> from partsong_zoo.products.problems import parse
    >>> in_sequence(work_out(parse("12*3=?")))[0].text
    '21*3.1:3*2=06,1=03;630.06,03,00.answer: 36'
    """
    threads = "".join(f".{number}:{thread.text}" for number, thread in enumerate(work.threads, 1))
    return (Piece(f"{work.begin}{threads}.{work.together}.{_last(work)}"),)


def _last(work: ProductWork) -> str:
    return f"{ANSWER}{work.answer}"
