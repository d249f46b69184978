"""Reads what follows a number: its unit, the thing that is counted, or a word such as "million".

A noun may be any word, so what is known here is which words are none: those that change the value, such as "squared"
and "or more", and letters that may be variables.

>>> unit_factor(" km/h"), unit_factor(" million dollars"), unit_factor(" squared"), unit_factor("x", glued=True)
(1, 1000000, None, None)
"""

from __future__ import annotations

import re

__all__ = ["SYMBOLS", "WORD", "changes_value", "unit_factor"]

#: Finds a word of a unit.
WORD = r"[A-Za-zµμΩ]+"
_POWER = r"(?:\s*\^\s*[({]?\s*[-+]?\s*[0-9]\s*[)}]?|[23](?![0-9]))?"
_FACTOR = rf"{WORD}(?:'s|s')?\.?{_POWER}"
_UNIT = re.compile(rf"\s*{_FACTOR}(?:\s*[/*·.-]?\s*{_FACTOR})*\s*")

_SYMBOLS = """
    m g s h L N J W V K km cm mm dm nm µm μm ft in yd mi lb lbs oz kg mg µg hr hrs min ms ns sec mph kph kmh rpm ml mL
    dl cl kL ha sq cu Hz kHz MHz GHz kW MW kWh Wh eV kN kJ MJ Pa kPa MPa psi bar atm mol kV mV mA kB KB MB GB TB kb ppm
    deg rad pt qt gal cc yr yrs pct kcal cal th st nd rd ohm Ω kΩ USD EUR GBP CHF JPY CNY INR cms kms kgs yds fts
"""
#: Symbols of units that no vowel makes a word.
SYMBOLS = frozenset(_SYMBOLS.split())
_SMALL_WORDS = frozenset({"of", "in", "on", "at", "an", "US"})
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
#: Words after a number that make it another one.
_CHANGING = """
    dozen dozens score gross half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths eighth
    eighths tenth tenths hundredth hundredths thousandth thousandths hundreds thousands millions billions lakh crore
    squared cubed factorial plus minus divided mod modulo base remainder infinity sqrt root log sin cos tan cot sec csc
    exp pi tau theta alpha beta gamma lambda sigma omega phi am pm
"""
#: Words that join a number to something else.
_JOINING = """
    and or to nor not no none over more less fewer greater than least most point but except unless between through
    either both
"""
_CHANGES, _JOINS = frozenset([*_CHANGING.split(), *_SCALES]), frozenset(_JOINING.split())


def changes_value(word: str) -> bool:
    """Returns whether a word after a number makes another number of it.

    >>> changes_value("dozen"), changes_value("apples")
    (True, False)
    """
    return word.lower() in _CHANGES


def unit_factor(text: str, *, glued: bool = False) -> int | None:
    """Returns what a number is multiplied by that the text follows: 1 for units, more for words such as "thousand".

    Args:
        text: what follows the number, without digits other than exponents of units.
        glued: whether no blank parts it from the number, so that one letter is more likely a variable.

    Returns:
        The factor; None where the text is not understood.
    """
    if not text.strip():
        return 1
    if len(text) > 200 or not _UNIT.fullmatch(text):
        return None
    words, factor = re.findall(WORD, text), 1
    while words and words[0].lower() in _SCALES:
        factor *= _SCALES[words.pop(0).lower()]
    if words and glued and (len(words[0]) == 1 or words[0] not in SYMBOLS):
        return None
    return factor if all(map(_is_unit, words)) else None


def _is_unit(word: str) -> bool:
    if word in SYMBOLS or word in _SMALL_WORDS:
        return True
    is_noun = len(word) > 2 and re.search("[aeiouAEIOU]", word) is not None
    return is_noun and not changes_value(word) and word.lower() not in _JOINS
