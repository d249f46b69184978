r"""Reads a text that is one number, exactly: arithmetic, with or without a name before it and a unit after it.

A text is understood as a whole or not at all. Two numbers, a range, a clock's time, an inequality, a variable and
anything else that is not known here have no value.

>>> read_number(r"x = 2\tfrac{2}{3} \text{ cm}^2"), read_number("1.5 million"), read_number("(3, 5)")
(Fraction(8, 3), Fraction(1500000, 1), None)
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from partsong.reasoning.answers.arithmetic import read_arithmetic
from partsong.reasoning.answers.expression import ExpressionError
from partsong.reasoning.answers.numerals import plain_numerals
from partsong.reasoning.answers.units import unit_factor

__all__ = ["CURRENCY", "MAX_DIGITS", "read_number"]

#: Most digits of a number; longer ones do not count as answers.
MAX_DIGITS = 400
_MAX_CHARS = 1000
#: Largest number whose factorial is worked out.
_MAX_FACTORIAL = 400

#: Finds signs of currencies, which are left out like other units.
CURRENCY = re.compile(
    r"\\?\$|[€£¥₹₩¢]|\\(?:pounds|euro|texteuro|yen)(?![A-Za-z])\s*|\b(?:USD|EUR|GBP|US|Rs\.?)(?=\s?[$0-9])"
)
_UNSURE = re.compile(
    r"[0-9]\s*(?:[\u2012-\u2015]|--|\\text\{\s*-+\s*\})\s*[0-9]"  # a range
    r"|[-+]{2}|\u00b1"
    r"|\.\.\.|\u2026"
    r"|[0-9]\s*/\s*[0-9.]+\s*/"  # a date, or a fraction of a fraction
    r"|[0-9]-0[0-9]"
    r"|[0-9)%]\s*[-+]\s*[0-9.]+\s?\\?%"
    r"|(?<![0-9])[0-9]{1,2}:[0-5][0-9](?![0-9])"  # a time, or a ratio
)
_TUPLE = re.compile(r"[(\[][^()\[\]]*,")
_BETWEEN = re.compile(r"[,;]|\b(?:and|or|to)\b")
_OUTSIDE = re.compile(r"[(\[][^()\[\]]*[)\]]")
_PREFIX = re.compile(
    r"(?:\s*\([A-Z]\)(?=\s*[^\s+*/^-]))?(?:\s*\b(?:the|final|correct|answer|ans|result|value|total|solution|sum|is|"
    r"equals|about|approximately|approx|roughly|around|exactly)\b[.:]?)*\s*(?P<minus>(?:minus|negative)\b)?",
    re.IGNORECASE,
)
_TEX_WORDS = re.compile(
    r"\\(?:left|right|bigg?[lr]?|Bigg?[lr]?|displaystyle|textstyle|[lL]arge|LARGE|huge|Huge|bf|rm|it)(?![A-Za-z])"
)
_REWRITTEN = [
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}|\\[()\[\]]|\\?%"), ""),
    (_TEX_WORDS, ""),
    (
        re.compile(
            r"\s?(?:\^\s?\{?\s?\\circ\s?\}?|\\degrees?(?![A-Za-z])|[°º˚])(?:\s?(?:[CFK]\b|\\(?:text|mathrm)\s?\{\s?[CFK]\s?\}))?|[℃℉]"
        ),
        " ",
    ),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|·"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1 \2"),
    (re.compile(r"\\Omega(?![A-Za-z])"), "Ω"),
    (re.compile(r"\\mu\s?(?=[mgsL]\b)"), "µ"),
    (re.compile(r"\\colon(?![A-Za-z])"), ":"),
    (re.compile(r"\\(?:approx|simeq|sim|doteq)(?![A-Za-z])|[\u2243\u223c\u2250]"), "≈"),
    (re.compile(r"\\(?:text)?minus(?![A-Za-z])"), "-"),
    (re.compile(r"(?<![A-Za-z])\{\s*([-+])\s*\}"), r"\1"),
    (re.compile(r"(?<=[0-9])\s?[xX]\s?(?=10\s?\^)"), "*"),
    (re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([-+]?[0-9]{1,3})(?![\w.])"), r"(\1*10^(\2))"),
]
_WRAPPERS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|normal)|operatorname|mbox|hbox|emph|underline|"
    r"boldsymbol|bm|boxed|fbox|ensuremath|num|unit|si)\*?\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"(?:(?<![\w.^])([0-9]+) ?)?\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]{0,20})\\(?:overline|bar)\s?\{([0-9]{1,20})\}")
_GROUP = re.compile(r"(?<![A-Za-z\\}])(?<![A-Za-z}] )\{([^{}\\]*)\}")
_ASIDE = re.compile(r"\(\s*([A-Za-z][A-Za-z .]*)\)\s*$")
_THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_RATIO = re.compile(r"([^:]+):([^:]+)")
_FACTORIAL = re.compile(r"(?<![0-9.])([0-9]{1,3})\s?!(?!\s?!)")


def read_number(text: str) -> Fraction | None:
    r"""Returns the value of a text that is one number; None where any part of the text is not understood.

    Args:
        text: the number, in LaTeX or plainly. Percent signs, degrees and currencies are left out; of an equation the
            right side counts.

    >>> read_number(r"1{,}200.50\text{ dollars}"), read_number("10^3"), read_number("5x"), read_number("1 2")
    (Fraction(2401, 2), Fraction(1000, 1), None, None)
    """
    if len(text) > _MAX_CHARS:
        return None
    plain = plain_numerals(text)
    if _UNSURE.search(plain):
        return None
    *before, last = re.split("[=≈]", flat := _without_tex(plain))
    if any(_BETWEEN.search(_OUTSIDE.sub("", part)) for part in before):
        return None  # several equations
    value = _quantity(last)
    if "≈" in flat and any(_quantity(part) not in (None, value) for part in before):
        return None  # an exact value and a rounded one
    return value


def _without_tex(plain: str) -> str:
    """Rewrites the commands that are known, from the innermost braces outwards; others stay, and are not understood."""
    for pattern, new in _REWRITTEN:
        plain = pattern.sub(new, plain)
    plain = CURRENCY.sub("", plain)
    for _ in range(20):
        before = plain
        plain = _REPEATING.sub(_repeated, plain)
        plain = _OVER.sub(r"\\frac{\1}{\2}", _WRAPPERS.sub(r" \1 ", plain))
        plain = _GROUP.sub(r"(\1)", _FRACTION.sub(_divided, plain))
        if plain == before:
            break
    return _ASIDE.sub(r" \1", plain)


def _divided(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    if top.strip()[:1].isalpha():  # a unit
        return f"{whole or ''} {top}/{bottom}"
    if whole is None:
        return f"(({top})/({bottom}))"
    is_mixed = top.strip().isdigit() and bottom.strip().isdigit() and int(top) < int(bottom)
    return f"({whole}+{top}/{bottom})" if is_mixed else f"{whole} (({top})/({bottom}))"


def _repeated(match: re.Match[str]) -> str:
    whole, first, repeated = match.groups()
    return f"({whole or 0}.{first or 0}+{repeated}/{(10 ** len(repeated) - 1) * 10 ** len(first)})"


def _quantity(text: str) -> Fraction | None:
    """Reads a number and its unit, with words before them that do not matter."""
    text = text.strip(' :*`"').rstrip(" .,;:*`")
    prefix = _PREFIX.match(text)
    assert prefix is not None
    rest = text[prefix.end() :].strip()
    digits = re.match("[^A-Za-zµμΩ]*", rest)
    assert digits is not None
    factor = unit_factor(rest[digits.end() :], glued=digits[0] == digits[0].rstrip())
    value = _arithmetic(digits[0])
    if factor is None or value is None or _TUPLE.search(text):
        return None
    value *= -factor if prefix["minus"] else factor
    return value if max(abs(value.numerator), value.denominator) < 10**MAX_DIGITS else None


def _arithmetic(text: str) -> Fraction | None:
    text = _FACTORIAL.sub(_factorial, _THOUSANDS.sub(lambda thousands: thousands[0].replace(",", ""), text.strip()))
    if "," in text:
        return None
    if ratio := _RATIO.fullmatch(text):
        text = f"({ratio[1]})/({ratio[2]})"
    try:
        return read_arithmetic(text).value()
    except ExpressionError:
        return None


def _factorial(match: re.Match[str]) -> str:
    return f"({math.factorial(int(match[1]))})" if int(match[1]) <= _MAX_FACTORIAL else match[0]
