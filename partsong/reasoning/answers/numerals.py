r"""Spells the numerals of TeX and Unicode one way: thousands marks, mixed numbers, fractions, signs, exponents.

It changes the spelling only, so formulas may pass as well as numbers. What could mean two things stays as it is: the
dash of ``5–10``, and blanks between digits that do not group thousands.

>>> plain_numerals("10\\,000"), plain_numerals("2 2/3"), plain_numerals("−½"), plain_numerals("1 2")
('10000', '2\\frac{2}{3}', '-\\frac{1}{2}', '1 2')
"""  # noqa: RUF002

from __future__ import annotations

import re
import unicodedata

__all__ = ["PARTED_DIGITS", "plain_numerals"]

#: Finds digits with blanks between them: one number or two is then for nobody to say.
PARTED_DIGITS = re.compile(r"[0-9.] +[0-9]|[0-9] +\.[0-9]")

_SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_HYPHENS = "\u2010\u2011\u2212\ufe63\uff0d"
_FULL_WIDTH = {0xFF01 + n: 0x21 + n for n in range(94) if chr(0x21 + n) in "0123456789%+,./:=()"}
_CHARACTERS = str.maketrans(
    {
        **_FULL_WIDTH,
        **dict.fromkeys(_SPACES, " "),
        **dict.fromkeys("\u00ad\u200b\u200d\u2060\ufeff", ""),
        **dict.fromkeys(_HYPHENS, "-"),
        **dict.fromkeys("\u2018\u2019\u02bc", "'"),
        **dict.fromkeys("\u2044\u2215", "/"),
        **dict.fromkeys("\u00d7\u22c5\u2217\u2715", "*"),
        **{"\u00f7": "/", "\u2236": ":"},
    }
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_RAISED_NUMBER = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")


def _grouped(mark: str, after: str = "") -> re.Pattern[str]:
    """Finds digits in groups of three, with the mark between them; what follows must not be `after`."""
    return re.compile(rf"(?<![\w.,^'])(?<![\d.,] )[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+(?!\d|{mark}\d|,\d{after})")


_GROUPED = [_grouped(r"\{,\}"), _grouped("'"), _grouped(r"\\?_"), _grouped(" ", r"| ?/| ?\\frac")]
_REWRITTEN = [
    (re.compile(r"\\(?:!|negthinspace(?![A-Za-z]))"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![A-Za-z])|(?:thin|med|thick|en)space(?![A-Za-z]))|~|\s"), " "),
    (re.compile(r"(?<!\\)\\\s*$"), ""),
    (re.compile(r" {2,}"), " "),
    (re.compile(r"(?<=[0-9])\{\.\}(?=[0-9])"), "."),
    (re.compile(r"\\(?:text|mathrm|mathord|mathpunct)\s?\{,\}"), "{,}"),
    # An en dash between digits may be a range, and an em dash is a sign only where nothing comes before it.
    (re.compile(r"(?<![0-9])[\u2012\u2013]|[\u2012\u2013](?![0-9])|^\s*[\u2014\u2015](?=\s*[0-9.\\])"), "-"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])|\\(?:nice|s)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*([0-9])"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9])"), r"\1{\2}"),
]
_DECIMAL_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_MIXED = re.compile(
    r"(?<![\w.,/^])(?<![\w.,/^] )([0-9]+) ([1-9][0-9]?) ?/ ?([0-9]{1,3})(?![\w^!]| ?/|\.[0-9]|,[0-9]{3})"
)


def plain_numerals(text: str) -> str:
    r"""Spells a text's numerals plainly, and leaves the rest of it.

    Args:
        text: one line; line ends become blanks.

    >>> plain_numerals(r"1{,}234{,}567"), plain_numerals(r"3{,}14"), plain_numerals("10³ and \\dfrac12")
    ('1234567', '3.14', '10^{3} and \\frac{1}{2}')
    """
    text = _RAISED_NUMBER.sub(lambda raised: f"^{{{raised[0].translate(_RAISED)}}}", text)
    text = _VULGAR.sub(_written_out, text).translate(_CHARACTERS)
    for pattern, plain in _REWRITTEN:
        text = pattern.sub(plain, text)
    for pattern in _GROUPED:
        text = pattern.sub(lambda group: re.sub("[^0-9]", "", group[0]), text)
    return _MIXED.sub(_mixed, _DECIMAL_COMMA.sub(".", text))


def _written_out(vulgar: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", vulgar[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    return rf"{whole}\frac{{{top}}}{{{bottom}}}" if int(top) < int(bottom) else match[0]
