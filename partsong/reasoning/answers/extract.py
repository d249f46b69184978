r"""Finding the answer in a model's text, by reading it: boxes, numbers, letters, expressions, code.

Every function takes a text and returns the answer spelled in one way, so that answers that mean the same are equal, or
None where the text names none. The last answer counts, what stands inside ``<think>`` does not, and only the last
`TAIL` characters are looked at. All of them take time proportional to that, whatever the text. Lists and grids are in
`partsong.reasoning.answers.extract_rows`.

>>> final_number(r"so \boxed{\frac{6}{8}}"), final_choice("The answer is (B)."), final_expression("try (5+3)*2 = 16")
('3/4', 'B', '(3+5)*2')
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from partsong.reasoning.answers.arithmetic import ExpressionError, read_arithmetic

__all__ = [
    "TAIL",
    "final_choice",
    "final_code",
    "final_expression",
    "final_math",
    "final_number",
    "last_boxed",
    "normal_math",
    "spoken",
]

#: How much of a text's end is looked at.
TAIL = 100_000
#: Digits of a number; longer ones are no answers.
_MAX_DIGITS = 400

_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])[-−](?:\\?\$)?)?"  # noqa: RUF001
    r"(?P<top>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
    r"|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2}(?!\w))?|(?<![0-9])\.[0-9]+)"
    r"(?:/(?P<bottom>[0-9]+))?",
    re.ASCII,
)
_FRACTION = re.compile(
    r"(?P<sign>-\s?)?\\[dt]?frac\s?\{?\s?(?P<top>[0-9]{1,99})\s?\}?\s?\{?\s?(?P<bottom>[0-9]{1,99})\}?"
)
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]{0,200})\}")
_UNITS = re.compile(r"\\[$%!,; ]|\$|%|\^\s?\{?\\circ\}?|\\(?:left|right)(?![A-Za-z])|~|[.,;\s]+$")
_NAMED = re.compile(r"^\s*\\?[A-Za-z]{1,8}\s*=\s*")
_SAID = re.compile(r"(?i:answer)[\s*:=]{0,8}(?i:is|would be|must be)?[\s*:=]{0,8}")
_SAID_CHOICE = re.compile(_SAID.pattern + r"(?i:option|choice)?[\s*:]{0,4}[(\[]?([A-Z])(?![\w'])", re.ASCII)
_ONE_LETTER = re.compile(r"[\s*(\[]{0,8}([A-Z])[\s*)\].:]{0,8}", re.ASCII)
_BRACKETED = re.compile(r"\(([A-Z])\)")
_ARITHMETIC = re.compile(r"[0-9+\-*/^().,×·÷−\s{}]|\\[A-Za-z]+")  # noqa: RUF001
_BULLET = re.compile(r"^\s{0,20}(?:[0-9]{1,2}[.)]|[-*•])\s+")
_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([\w+-]{0,20})[^\n]{0,200}$", re.MULTILINE)


def spoken(text: str) -> str:
    """The end of a text without hidden reasoning: what stands after ``</think>``, at most `TAIL` characters.

    >>> spoken("<think>is it 3?</think>It is 4."), spoken("<think>is it 3?")
    ('It is 4.', '')
    """
    _, closed, after = text.rpartition("</think>")
    said = after if closed else text.partition("<think>")[0]
    return said[-TAIL:]


def last_boxed(text: str) -> str | None:
    r"""What stands in the last closed ``\boxed{}``, braces inside it included.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    said, open_at, found = spoken(text), [], None
    if "box" not in said:
        return None
    for brace in _BRACES.finditer(said):
        token = brace.group()
        if token.endswith("{") and token != r"\{":
            open_at.append(brace.end() if len(token) > 1 else None)
        elif token == "}" and open_at:
            begin = open_at.pop()
            found = found if begin is None else (begin, brace.start())
    return None if found is None else said[slice(*found)].strip()


def final_number(text: str) -> str | None:
    r"""The number in the last ``\boxed{}``, or else the last number of a text, in lowest terms.

    A comma is read as a separator of thousands where groups of three follow, a minus as a sign where nothing stands
    before it to be subtracted from.

    >>> final_number("6 of 8, that is \\boxed{6/8}."), final_number("1,200.50 dollars"), final_number("none")
    ('3/4', '2401/2', None)
    """
    boxed = last_boxed(text)
    # A box without digits, such as one around a word, decides nothing.
    return _last_number(spoken(text)) if boxed is None or not re.search("[0-9]", boxed) else _number_of(boxed)


def _number_of(boxed: str) -> str | None:
    """The value of what stands in a box: a formula is worked out, units are dropped; None for roots and the like."""
    bare = _NAMED.sub("", _UNITS.sub(" ", _WORDS.sub(" ", boxed[:1000]))).strip()
    try:
        return _spelled(read_arithmetic(bare).value())
    except ExpressionError:
        return None if re.search(r"[\\^]", bare) else _last_number(bare)


def _last_number(text: str) -> str | None:
    ends = [found for pattern in (_FRACTION, _NUMBER) for found in deque(pattern.finditer(text), maxlen=1)]
    if not ends:
        return None
    # Of two that end together, the fraction is the whole and the number a part of it: max takes the first.
    last = max(ends, key=lambda found: found.end())
    sign, top, bottom = last["sign"], last["top"].replace(",", ""), last["bottom"] or "1"
    if len(top) + len(bottom) > _MAX_DIGITS or int(bottom) == 0:
        return None
    if bottom == "1" and top.isdigit():  # most numbers: no need for the slower arithmetic of fractions
        return str(-int(top) if sign else int(top))
    return _spelled(Fraction(top) / int(bottom) * (-1 if sign else 1))


def _spelled(value: Fraction) -> str | None:
    return str(value) if max(abs(value.numerator), value.denominator) < 10**_MAX_DIGITS else None


def final_choice(text: str, letters: str = "ABCDE") -> str | None:
    r"""The letter of an option: in the last box, after "answer is", alone in a line, or the last one in brackets.

    Args:
        text: the text.
        letters: the options there are; others are passed over.

    >>> final_choice(r"(A) is tempting. \boxed{\text{C}}"), final_choice("A dog.")
    ('C', None)
    """
    boxed = last_boxed(text)
    if boxed is not None:
        inner = _ONE_LETTER.fullmatch(_WORDS.sub(r"\1", boxed[:400]))
        return inner[1] if inner is not None and inner[1] in letters else None
    said = spoken(text)
    lines = (_ONE_LETTER.fullmatch(line) for line in said.splitlines() if len(line) < 24)
    for found in (_SAID_CHOICE.finditer(said), (line for line in lines if line), _BRACKETED.finditer(said)):
        named = [one[1] for one in found if one[1] in letters]
        if named:
            return named[-1]
    return None


def final_expression(text: str) -> str | None:
    r"""The last arithmetic expression with an operator: what is in the box, or on the last line that holds one.

    What follows "=" is left out, and so is what stands before a colon. One spelling is returned for all orders of
    terms and factors; `partsong.reasoning.answers.arithmetic.read_arithmetic` reads it.

    >>> final_expression("(25 - 5) * 3 = 60"), final_expression("Answer: 3 * (25-5)")
    ('(25-5)*3', '(25-5)*3')
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return _expression(boxed)
    for line in reversed(spoken(text)[-4000:].splitlines()):
        if (found := _expression(line)) is not None:
            return found
    return None


def _expression(line: str) -> str | None:
    """The expression of a line: the longest run of arithmetic before its last "="."""
    # In a chain, 1 + 2 = 3 + 0 = 3, the first member is the one that was asked for.
    for part in re.split(r"[=:$`]|\\\(|\\\)|\*\*(?=\s|$)|(?:^|(?<=\s))\*\*", _BULLET.sub("", line[:1000])):
        runs, last = [""], 0
        for char in _ARITHMETIC.finditer(part):
            if char.start() != last:
                runs.append("")
            runs[-1] += char.group()
            last = char.end()
        for run in sorted(runs, key=len, reverse=True)[:3]:
            try:
                read = read_arithmetic(run.strip().strip(".,").strip())
            except ExpressionError:
                continue
            if read.operators():
                return read.canonical()
    return None


def final_math(text: str) -> str | None:
    r"""A mathematical answer as LaTeX: what is in the last box, after "answer is", or between the last dollar signs.

    >>> final_math(r"Hence \boxed{x = \dfrac{1}{2}}."), final_math("The answer is $3\sqrt{2}$.")
    ('\\frac{1}{2}', '3\\sqrt{2}')
    """
    found = last_boxed(text)
    if found is None:
        said = spoken(text)[-4000:]
        *_, after = [None, *_SAID.finditer(said)]
        lines = said[after.end() :].lstrip().splitlines() if after is not None else []
        within = re.findall(r"\$([^$\n]{1,400})\$", lines[0] if lines else said)
        found = within[-1] if within else lines[0] if lines else _last_number(said)
    return (normal_math(found) or None) if found else None


def normal_math(text: str) -> str:
    r"""A LaTeX answer in a plainer spelling: no ``\left``, no dollar signs, units as words, or spaces, ``x =`` dropped.

    >>> normal_math(r"x = \left( 3,\; \tfrac{\pi}{2} \right)"), normal_math("1,000 \\text{ cm}")
    ('(3,\\frac{\\pi}{2})', '1000')
    """
    said = text[:2000].strip()
    said = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[!,;()\[\]]|\\?\$", "", said)
    said = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", said)
    said = re.sub(r"(?<=[0-9}])\s{0,4}\\(?:text|mathrm|mbox)\s?\{[^{}]{0,40}\}(?:\^\{?[0-9]\}?)?$", "", said)
    said = _WORDS.sub(r"\1", said)
    said = _NAMED.sub("", re.sub(r"\^\s?\{?\\circ\}?", "", said))
    said = said.replace(",", "") if _thousands(said) else said
    said = re.sub(r"\s+", " ", re.sub(r"(?<!\\)\\(?=\s)|~", " ", said))
    # A blank is needed where a command would run into a letter: \sin x.
    return re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])| ", lambda blank: f"{blank[1]} " if blank[1] else "", said).rstrip(".,;")


def _thousands(text: str) -> bool:
    return re.fullmatch(r"-?\s?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?\s*", text) is not None


def final_code(text: str, language: str | None = "python") -> str | None:
    r"""The last fenced block of code in a language, or without a label; one that is not closed goes to the end.

    Args:
        text: the text.
        language: its label, in lower case; None for any.

    >>> final_code("Try this:\n```python\nx = 1\n```\nDone.")
    'x = 1\n'
    """
    said, blocks, begin = spoken(text), [], None
    for fence in _FENCE.finditer(said):
        if begin is None:
            begin = (fence[1].lower(), fence.end() + 1)
        elif not fence[1]:
            blocks.append((begin[0], said[begin[1] : fence.start()]))
            begin = None
    if begin is not None:
        blocks.append((begin[0], said[begin[1] :]))
    labels = {language, "", *({"py", "python3"} if language == "python" else ())}
    return next((code for label, code in reversed(blocks) if language is None or label in labels), None)
