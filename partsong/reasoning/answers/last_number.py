r"""Finds the last number of a text in prose, and reads it with what stands around it.

The last digit of a text marks the number. What belongs to it, from the first of its signs to its unit, is read as a
whole by `partsong.reasoning.answers.number.read_number`; a number that is part of a name, of a longer formula or of a
list has no value.

>>> last_number("So she needs 2 2/3 cups."), last_number("It takes 5-10 minutes."), last_number("We get $x = 10^3$.")
(Fraction(8, 3), None, Fraction(1000, 1))
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from itertools import islice

from partsong.reasoning.answers.number import CURRENCY, read_number
from partsong.reasoning.answers.numerals import plain_numerals
from partsong.reasoning.answers.units import SYMBOLS, WORD, changes_value, unit_factor

__all__ = ["last_number"]

#: Most characters of a line, and most lines with a digit, that are read.
_MAX_LINE, _MAX_LINES = 2000, 50

_SEED, _DIGIT = re.compile(r"\d|[¼½¾⅐-⅞]"), re.compile(r"\d")
_BULLET = re.compile(r"^\s{0,20}(?:#{0,6}\s?[*_]{0,3}\(?[0-9]{1,2}[.)][*_]{0,3}|[-*•>])\s+(?=\S)")
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    # As in Markdown, dollar signs are no currency where no blank is inside of them, and no digit follows.
    r"|(?<![\\$\w])\$(?=[^\s$])([^$]{1,400}?)(?<=[^\s\\])\$(?![$0-9])"
)
_POWER = r"\s?\^\s?[{(]?\s?-?[0-9]\s?[})]?"
_SIMPLER = [
    (re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|emph|underline)\s?\{([^{}]{0,80})\}"), r" \1"),
    (re.compile(r"°\s?[CFK]\b"), "°"),
    (re.compile(r"(?<!\w)'([^']{1,40})'(?!\w)"), r"\1"),
    # The digits in powers of units are not the number's.
    (re.compile(rf"(?<![A-Za-z\\])({'|'.join(SYMBOLS)}|[a-z]{{4,40}}){_POWER}"), r"\1"),
    (re.compile(r"(?<![A-Za-z\\])([mck]?m|ft|in|yd)[23](?![0-9])"), r"\1"),
    (re.compile(r"</?[A-Za-z][^<>]{0,60}>"), " "),
    # Signs of Markdown, and dashes that part sentences.
    (re.compile(r"(?<![^\s(\[:=\"'-])[*_]{1,3}(?=\S)|(?<=\S)[*_]{1,3}(?=$|[\s).,;:!?\]\"'%-])|`"), ""),
    (re.compile(r"(?<=[A-Za-z.:)])\s?[\u2014\u2015]\s?"), " ; "),
    (re.compile(r"(?<![^\s(\[=])[\u2014\u2015](?=[0-9.])"), "-"),
]
_NUMERAL = re.compile(
    r"(?:[\d\s.,+\-*/^(){}\[\]:=!%°'_~≈÷·\u2012-\u2015\u2026]|\\frac(?![A-Za-z])|\\(?:times|cdot|div)(?![A-Za-z])|\\%"
    r"|(?<=[0-9])[eE](?=[-+]?[0-9])|(?<=[0-9])[xX](?=[0-9])|(?<=[0-9] )[xX](?= [0-9]))+"
)
_END_OF_SENTENCE = re.compile(r"(?<=\S)[.;:?]\s+|(?<=\S)!\s+(?!=)")
_JOINED = re.compile(
    r"[0-9][)}$%]{0,3}(?:\s?[A-Za-z]{1,3})?\s?(?:[,;&]|,?\s?\b(?:and|or|to|through|by|minus|plus|times)\b)\s*"
    r"(?:and\s|or\s)?\s*\$?(?:[A-Za-z]\s?)?$"
    r"|[0-9]\s?(?:feet|foot|ft|hours?|hrs?|h|minutes?|min|lbs?|pounds?|dollars?|years?|months?|weeks?|days?|degrees?|°|"
    r"'|r|remainder)\s?(?:and\s)?$"
    r"|\b(?:log|ln|sin|cos|tan|sqrt|exp)\s?$"
    r"|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|hundred)\s(?:minus|plus|times|over|and)\s?$"
    r"|[<>≤≥≠±∓√∈]\s?$|\\(?!approx|simeq|sim|implies|therefore|to|rightarrow|Rightarrow)[A-Za-z]+\s?$",
    re.IGNORECASE,
)
_RANGE = re.compile(r"[0-9.,/]+(?:\s*-\s*[0-9.,/]+)+")
_NEGATIVE = re.compile(r"\b(?:minus|negative)\s*$", re.IGNORECASE)
_WORD_AFTER = re.compile(rf"(\s*)({WORD})")
_MORE_AFTER = re.compile(
    r"[_\\万億亿千百十半兆]|\s-\s[A-Za-z]\b|\s*,?\s*and\s(?:a|one|two|three)[\s-](?:half|third|quarter|fourth|fifth|tenth)"
    r"|\sor\s(?:more|less|fewer)",
    re.IGNORECASE,
)
#: Finds signs that join a number to something before it.
_OPEN = re.compile(r"[*/^]|[-+]\s")


def last_number(text: str) -> Fraction | None:
    """Returns the value of the last number of a text; None without one, or where it is not understood.

    Args:
        text: any text. The time is proportional to its length.
    """
    lines = islice(filter(_SEED.search, reversed(text.splitlines())), _MAX_LINES)
    line = next(filter(_DIGIT.search, map(_simple, lines)), None)
    return None if line is None else _last_of(line)


def _simple(line: str) -> str:
    """Returns the end of a line without bullets, emphasis and the powers of units."""
    line = plain_numerals(_BULLET.sub("", line) if len(line) <= _MAX_LINE else line[-_MAX_LINE:])
    for pattern, simpler in _SIMPLER:
        line = pattern.sub(simpler, line)
    return line


# Many methods read the same texts of a pool, and most answers end in one of few lines.
@functools.lru_cache(maxsize=1 << 15)
def _last_of(line: str) -> Fraction | None:
    place = max(digit.start() for digit in _DIGIT.finditer(line))
    for formula in _FORMULA.finditer(line):
        if formula.start() < place < formula.end():
            value = read_number(next(filter(None, formula.groups())))
            return _in_context(value, line[: formula.start()], line[formula.end() :])
    line = CURRENCY.sub("", line)
    *_, run = (run for run in _NUMERAL.finditer(line) if _DIGIT.search(run[0]))
    return _last_of_run(line, run.start(), run.end())


def _last_of_run(line: str, start: int, end: int) -> Fraction | None:
    """Reads the last number of a run of signs that numbers are made of; all that is joined to it counts."""
    for stop in _END_OF_SENTENCE.finditer(line, start, end):
        if _DIGIT.search(line, stop.end(), end):
            start = stop.end()
    piece = line[start:end].rstrip(" .,;:=([{-")
    *left, right = piece.split("=")
    number = _balanced(re.sub(r"^(?:[ ,;:)\]}]|\.(?![0-9]))+", "", right))
    is_part = re.match(r"[|0-9A-Za-z_\\}À-ɏΑ-ω]", line[start - 1 : start]) and not re.match(r"[\s:,;]|[)\]]\s", piece)
    if not left and (is_part or _OPEN.match(number) or _RANGE.fullmatch(number)):
        return None
    rest = line[start:end].rstrip()
    if rest.endswith(("!", "...", "\u2026")) or piece.endswith(("*", "/", "^", "+")):
        return None  # an exclamation or a factorial, further digits, half of a formula
    return _in_context(read_number(number), line[:start], line[start + len(piece) :])


def _balanced(number: str) -> str:
    """Drops brackets at the ends that belong to the sentence."""
    for opening, closing in ("()", "[]", "{}"):
        while number.count(closing) > number.count(opening) and number.endswith(closing):
            number = number[:-1].rstrip(" .,;:")
        while number.count(opening) > number.count(closing) and number.startswith(opening):
            number = number[1:].lstrip()
    return number


def _in_context(value: Fraction | None, before: str, after: str) -> Fraction | None:
    """Returns the value with the words around it: a sign, a power of ten; None where they join it to something else."""
    if value is None or _JOINED.search(before) or _MORE_AFTER.match(after):
        return None
    value *= -1 if _NEGATIVE.search(before) else 1
    word = _WORD_AFTER.match(after)
    if word is None:
        return value
    blank, noun = word.groups()
    factor = unit_factor(noun, glued=not blank)
    if blank and (noun in ("a", "A", "I") or (len(noun) > 1 and factor is None and not changes_value(noun))):
        return value  # the sentence goes on
    return None if factor is None else value * factor
