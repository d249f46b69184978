"""Draws accuracy against cost, and finds the strategies that no other one beats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from partsong.errors import ArgumentError

__all__ = ["COSTS", "front", "pareto_svg"]

#: Costs to draw, and their names in the picture.
COSTS = {"tokens_critical": "tokens on the critical path", "tokens_total": "tokens in all"}

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LINE = 460, 330, 56, 44, 46, 17
_COLOURS = (
    "#3366cc",
    "#dc6e00",
    "#2d8a4e",
    "#b03a9b",
    "#8a6d1d",
    "#c0392b",
    "#2a8fa3",
    "#6b58c9",
    "#5d6d7e",
    "#7f8c1f",
)
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.axis{stroke:#999}.grid{stroke:#e4e4e4}.small{font-size:11px}"
    ".front{fill:none;stroke:#888;stroke-dasharray:4 3}.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#333}.axis{stroke:#777}.paper{fill:#161616}}"
)


def front(rows: Sequence[Mapping[str, Any]], cost: str) -> list[Mapping[str, Any]]:
    """Returns the rows that no other row beats, the cheapest first.

    A row beats another if it is at least as accurate for less, or more accurate for the same cost.

    Args:
        rows: of one task, with ``accuracy`` and the cost.
        cost: the column.

    Returns:
        Those rows; of equal ones only the first.

    >>> rows = [{"accuracy": a, "tokens_total": t} for a, t in ((0.5, 9), (0.4, 3), (0.4, 9))]
    >>> [row["tokens_total"] for row in front(rows, "tokens_total")]
    [3, 9]
    """
    best: list[Mapping[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row[cost], -row["accuracy"])):
        if not best or row["accuracy"] > best[-1]["accuracy"]:
            best.append(row)
    return best


def pareto_svg(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> str:
    """Draws two charts, accuracy with its interval against each of `COSTS` on a logarithmic axis, and a legend.

    Args:
        rows: of `table_rows` or `pool_suite`, of one task.
        title: to write above.

    Returns:
        An SVG document, for light and dark.

    Raises:
        ArgumentError: there are no rows, or they belong to several tasks.
    """
    tasks = {row.get("task") for row in rows}
    if len(tasks) != 1:
        raise ArgumentError(f"a chart shows one task, found rows of {len(tasks)}; draw one for each")
    per_column = -(-len(rows) // 2)
    height = _HEIGHT + 14 + per_column * _LINE
    parts = [f'<rect class="paper" width="{2 * _WIDTH}" height="{height}"/>']
    parts.append(f'<text x="12" y="20" font-weight="600">{escape(title or str(next(iter(tasks))))}</text>')
    for place, (cost, words) in enumerate(COSTS.items()):
        parts.append(f'<g transform="translate({place * _WIDTH} 0)">{_chart(rows, cost, words)}</g>')
    for place, row in enumerate(rows):
        x, y = 12 + place // per_column * _WIDTH, _HEIGHT + 10 + place % per_column * _LINE
        label = f"{place + 1}. {row['strategy']}: {row['accuracy']:.1%} ({row['low']:.1%} to {row['high']:.1%})"
        parts.append(f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{_colour(place)}"/>')
        parts.append(f'<text class="small" x="{x + 14}" y="{y}">{escape(label)}</text>')
    size = f'width="{2 * _WIDTH}" height="{height}" viewBox="0 0 {2 * _WIDTH} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{"".join(parts)}</svg>\n'


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _chart(rows: Sequence[Mapping[str, Any]], cost: str, words: str) -> str:
    costs = [max(float(row[cost]), 1.0) for row in rows]
    low, high = math.log10(min(costs)) - 0.12, math.log10(max(costs)) + 0.12
    bottom = max(0.0, min(row["low"] for row in rows) - 0.02)
    top = min(1.0, max(row["high"] for row in rows) + 0.02)
    wide, tall = _WIDTH - _LEFT - 16, _HEIGHT - _TOP - _BOTTOM

    def across(value: float) -> float:
        return _LEFT + wide * (math.log10(max(value, 1.0)) - low) / (high - low)

    def down(value: float) -> float:
        return _TOP + tall * (1 - (value - bottom) / (top - bottom))

    floor = _TOP + tall
    parts = [f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{floor}H{_LEFT + wide}"/>']
    parts.append(f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(words)}</text>')
    for tick in _ticks(low, high):
        x = across(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{floor}"/>')
        parts.append(f'<text class="small" x="{x:.1f}" y="{floor + 15}" text-anchor="middle">{tick:,.0f}</text>')
    for step in range(5):
        value = bottom + (top - bottom) * step / 4
        parts.append(f'<path class="grid" d="M{_LEFT} {down(value):.1f}H{_LEFT + wide}"/>')
        parts.append(
            f'<text class="small" x="{_LEFT - 6}" y="{down(value) + 4:.1f}" text-anchor="end">{value:.0%}</text>'
        )
    line = " ".join(f"{across(row[cost]):.1f},{down(row['accuracy']):.1f}" for row in front(rows, cost))
    parts.append(f'<polyline class="front" points="{line}"/>')
    for place, row in enumerate(rows):
        x, colour = across(row[cost]), _colour(place)
        parts.append(f'<path stroke="{colour}" d="M{x:.1f} {down(row["low"]):.1f}V{down(row["high"]):.1f}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{down(row["accuracy"]):.1f}" r="4.5" fill="{colour}"/>')
        parts.append(f'<text class="small" x="{x + 7:.1f}" y="{down(row["accuracy"]) - 5:.1f}">{place + 1}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Returns round numbers between two powers of ten: 1, 2 and 5 of each, or only powers over a long range."""
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [step * 10.0**power for power in powers for step in steps if low <= math.log10(step * 10.0**power) <= high]
