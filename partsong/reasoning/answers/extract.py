r"""Finds the answer in a model's text, by reading it: boxes, numbers, letters, expressions.

Every function takes a text and returns the answer in a canonical spelling, so that equivalent answers are equal. It
returns None where the text names no answer. The last answer counts, text inside ``<think>`` does not, and only the last
`TAIL` characters are read. The time is proportional to that length for every text. Lists and grids are in
`partsong.reasoning.answers.extract_rows`, code in `extract_code`.

>>> final_number(r"so \boxed{\frac{6}{8}}"), final_choice("The answer is (B)."), final_expression("try (5+3)*2 = 16")
('3/4', 'B', '(3+5)*2')
"""

from __future__ import annotations

import re

from partsong.reasoning.answers.arithmetic import read_arithmetic
from partsong.reasoning.answers.expression import ExpressionError
from partsong.reasoning.answers.last_number import last_number
from partsong.reasoning.answers.number import read_number
from partsong.reasoning.answers.numerals import plain_numerals
from partsong.reasoning.answers.units import unit_factor

__all__ = [
    "TAIL",
    "final_choice",
    "final_expression",
    "final_math",
    "final_number",
    "last_boxed",
    "normal_math",
    "visible_text",
]

#: How many characters at the end of a text are read.
TAIL = 100_000

_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]{0,200})\}")
_UNIT = re.compile(r"(?<=[0-9}])\s{0,4}\\(?:text|mathrm|mbox)\s?\{(?P<words>[^{}]{0,40})\}(?:\^\{?[0-9]\}?)?\s*$")
#: A blank is needed where a command would run into a letter, as in \sin x, and between digits.
_BLANK = re.compile(r"(?P<needed>\\[A-Za-z]+ (?=[A-Za-z])|(?<=[0-9.]) (?=[0-9.])|(?<=[0-9],) (?=[0-9]{3}))| ")
_NAMED = re.compile(r"^\s*\\?[A-Za-z]{1,8}\s*=\s*")
_ANSWER_IS = re.compile(r"(?i:answer)[\s*:=]{0,8}(?i:is|would be|must be)?[\s*:=]{0,8}")
_CHOICE_IS = re.compile(_ANSWER_IS.pattern + r"(?i:option|choice)?[\s*:]{0,4}[(\[]?([A-Z])(?![\w'])", re.ASCII)
_ONE_LETTER = re.compile(r"[\s*(\[]{0,8}([A-Z])[\s*)\].:]{0,8}", re.ASCII)
_BRACKETED = re.compile(r"\(([A-Z])\)")
_ARITHMETIC = re.compile(r"[0-9+\-*/^().,×·÷−\s{}]|\\[A-Za-z]+")  # noqa: RUF001
_BULLET = re.compile(r"^\s{0,20}(?:[0-9]{1,2}[.)]|[-*•])\s+")


def visible_text(text: str) -> str:
    """Returns the end of a text without hidden reasoning: what follows ``</think>``, at most `TAIL` characters.

    >>> visible_text("<think>is it 3?</think>It is 4."), visible_text("<think>is it 3?")
    ('It is 4.', '')
    """
    _, closed, after = text.rpartition("</think>")
    visible = after if closed else text.partition("<think>")[0]
    return visible[-TAIL:]


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last closed ``\boxed{}``, with any braces inside; of a box within a box, the inner.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}"), last_boxed(r"\boxed{\boxed{7}}")
    ('\\frac{1}{2}', '7')
    """
    visible, open_at = visible_text(text), []
    if "box" not in visible:
        return None
    box, content = (0, 0), None
    for brace in _BRACES.finditer(visible):
        token = brace.group()
        if token.endswith("{") and token != r"\{":
            open_at.append(brace.span() if len(token) > 1 else None)
        elif token == "}" and open_at and (opened := open_at.pop()) is not None:
            around = visible[opened[1] : box[0]] + visible[box[1] : brace.start()]
            if content is None or box[0] < opened[1] or around.strip():
                content = (opened[1], brace.start())
            box = (opened[0], brace.end())
    return None if content is None else visible[slice(*content)].strip()


def final_number(text: str) -> str | None:
    r"""Returns the number in the last ``\boxed{}``, or else the last number of a text, in lowest terms.

    Units, percent signs and currencies are left out, thousands marks, mixed numbers, powers, ratios and factorials are
    understood. An answer of which any part is not understood, such as a list, a range or a variable, is None: a lost
    vote is better than a wrong one. An empty box decides nothing.

    >>> final_number("6 of 8, that is \\boxed{6/8}."), final_number("1,200.50 dollars"), final_number("none")
    ('3/4', '2401/2', None)
    >>> final_number("2 2/3 cups"), final_number(r"\boxed{12 \text{ cm}^2}"), final_number(r"\boxed{(3, 5)}")
    ('8/3', '12', None)
    """
    value = read_number(boxed) if (boxed := last_boxed(text)) else last_number(visible_text(text))
    return None if value is None else str(value)


def final_choice(text: str, letters: str = "ABCDE") -> str | None:
    r"""Returns the letter of an option: in the last box, after "answer is", alone on a line, or the last in brackets.

    Args:
        text: the text.
        letters: the letters of the options; other letters do not count.

    >>> final_choice(r"(A) is tempting. \boxed{\text{C}}"), final_choice("A dog.")
    ('C', None)
    """
    boxed = last_boxed(text)
    if boxed is not None:
        inner = _ONE_LETTER.fullmatch(_WORDS.sub(r"\1", boxed[:400]))
        return inner[1] if inner is not None and inner[1] in letters else None
    visible = visible_text(text)
    lines = (_ONE_LETTER.fullmatch(line) for line in visible.splitlines() if len(line) < 24)
    for matches in (_CHOICE_IS.finditer(visible), (line for line in lines if line), _BRACKETED.finditer(visible)):
        choices = [match[1] for match in matches if match[1] in letters]
        if choices:
            return choices[-1]
    return None


def final_expression(text: str) -> str | None:
    r"""Returns the last arithmetic expression with an operator: the one in the box, or on the last line that holds one.

    Anything after "=" or before a colon is left out. There is one spelling for all orders of terms
    and factors, which `partsong.reasoning.answers.arithmetic.read_arithmetic` reads.

    >>> final_expression("(25 - 5) * 3 = 60"), final_expression("Answer: 3 * (25-5)")
    ('(25-5)*3', '(25-5)*3')
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return _expression(boxed)
    for line in reversed(visible_text(text)[-4000:].splitlines()):
        if (expression := _expression(line)) is not None:
            return expression
    return None


def _expression(line: str) -> str | None:
    """Returns the expression of a line: the longest run of arithmetic before its last "="."""
    # In a chain, 1 + 2 = 3 + 0 = 3, the first member is the answer.
    for part in re.split(r"[=:$`]|\\\(|\\\)|\*\*(?=\s|$)|(?:^|(?<=\s))\*\*", _BULLET.sub("", line[:1000])):
        runs, last = [""], 0
        for char in _ARITHMETIC.finditer(part):
            if char.start() != last:
                runs.append("")
            runs[-1] += char.group()
            last = char.end()
        for run in sorted(runs, key=len, reverse=True)[:3]:
            try:
                expression = read_arithmetic(run.strip().strip(".,").strip())
            except ExpressionError:
                continue
            if expression.operators():
                return expression.canonical()
    return None


def final_math(text: str) -> str | None:
    r"""Returns a mathematical answer as LaTeX: from the last box, after "answer is", or between the last dollar signs.

    >>> final_math(r"Hence \boxed{x = \dfrac{1}{2}}."), final_math("The answer is $3\sqrt{2}$.")
    ('\\frac{1}{2}', '3\\sqrt{2}')
    """
    answer = last_boxed(text)
    if answer is None:
        end = visible_text(text)[-4000:]
        *_, answer_is = [None, *_ANSWER_IS.finditer(end)]
        lines = end[answer_is.end() :].lstrip().splitlines() if answer_is is not None else []
        formulas = re.findall(r"\$([^$\n]{1,400})\$", lines[0] if lines else end)
        answer = formulas[-1] if formulas else lines[0] if lines else final_number(end)
    return (normal_math(answer) or None) if answer else None


def normal_math(text: str) -> str:
    r"""Spells a LaTeX answer plainly: without ``\left``, dollar signs, units in words, spaces or a leading ``x =``.

    Blanks between digits stay: ``1 2`` is not 12.

    >>> normal_math(r"x = \left( 3,\; \tfrac{\pi}{2} \right)"), normal_math("1,000 \\text{ cm}"), normal_math("2 2/3")
    ('(3,\\frac{\\pi}{2})', '1000', '2\\frac{2}{3}')
    """
    math = plain_numerals(text[:2000]).strip()
    math = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[()\[\]]|\\?\$", "", math)
    math = _UNIT.sub(lambda unit: "" if unit_factor(unit["words"]) == 1 else unit[0], math)
    math = _NAMED.sub("", re.sub(r"\^\s?\{?\\circ\}?", "", _WORDS.sub(r"\1", math)))
    if re.fullmatch(r"-?\s?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?\s*", math):  # the commas separate thousands
        math = math.replace(",", "")
    math = re.sub(r"\s+", " ", re.sub(r"(?<!\\)\\(?=\s)", " ", math))
    return _BLANK.sub(lambda blank: blank["needed"] or "", math).rstrip(".,;")
