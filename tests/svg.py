"""Small plots as SVG, without a library: the same file on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 40, 60
COLOURS = ("#888888", "#1b6ca8", "#d1495b", "#2a9d55", "#8b5fbf", "#e08a00", "#00838f", "#6d4c41", "#c2185b", "#455a64")


@dataclass(frozen=True, slots=True)
class Series:
    """Holds points of one name, as pairs of x and y."""

    name: str
    points: list[tuple[float, float]]


def plot(title: str, x_name: str, y_name: str, series: list[Series]) -> str:
    """Returns a plot with a logarithmic x axis and a linear y axis that begins at 0.

    Points of a series are joined; a series of one point is a dot.
    """
    xs = [x for each in series for x, _ in each.points]
    top = max(y for each in series for _, y in each.points) * 1.1
    low, high = math.log10(min(xs)) - 0.1, math.log10(max(xs)) + 0.1

    def across(x: float) -> float:
        return LEFT + (math.log10(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 16}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="translate(18 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>',
    ]
    for x in _ticks(xs):
        lines += _tick(across(x), HEIGHT - BOTTOM + 20, f"{x:g}", "middle")
        lines.append(_line(across(x), TOP, across(x), HEIGHT - BOTTOM))
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if top / step <= 6)
    for y in (step * number for number in range(int(top / step) + 1)):
        lines += _tick(LEFT - 8, down(y) + 4, f"{y:.2g}", "end")
        lines.append(_line(LEFT, down(y), WIDTH - RIGHT, down(y)))
    for place, each in enumerate(series):
        lines += _drawn(each, place, [(across(x), down(y)) for x, y in sorted(each.points)])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _ticks(xs: list[float]) -> list[float]:
    """Returns numbers to write at the axis: the values where they are few and whole, and round ones elsewhere."""
    if len(set(xs)) <= 6 and all(x == int(x) for x in xs):
        return sorted(set(xs))
    powers = range(math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs))) + 1)
    for parts in ((1,), (1, 2, 5)):
        ticks = [part * 10.0**power for power in powers for part in parts]
        ticks = [tick for tick in ticks if 0.8 * min(xs) <= tick <= 1.25 * max(xs)]
        if len(ticks) >= 3:
            break
    return ticks


def _tick(x: float, y: float, text: str, anchor: str) -> list[str]:
    return [f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>']


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _drawn(series: Series, place: int, points: list[tuple[float, float]]) -> list[str]:
    colour, y = COLOURS[place % len(COLOURS)], TOP + 20 * place
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    lines = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'] if len(points) > 1 else []
    lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
    lines.append(f'<circle cx="{WIDTH - RIGHT + 20}" cy="{y}" r="4" fill="{colour}"/>')
    lines.append(f'<text x="{WIDTH - RIGHT + 32}" y="{y + 4}">{escape(series.name)}</text>')
    return lines
