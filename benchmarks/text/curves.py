"""Measures how accuracy falls as a rule accepts more tokens per step, as a curve and as one score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.text.aup import aup_board
from partsong.errors import ArgumentError

__all__ = ["SWEEPS", "curve", "scores", "sweep"]

#: For each rule the knob that trades accuracy for tokens per forward, and its values, the most careful first.
SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "quota": ("per_step", (1, 2, 4, 8)),
    "entropy-bound": ("gamma", (0.0, 0.1, 0.3, 1.0, 3.0)),
    "threshold": ("threshold", (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)),
    "factor": ("factor", (0.5, 1.0, 1.5, 2.0)),
    "entropy": ("threshold", (0.1, 0.2, 0.5, 1.0)),
    "kl-stable": ("threshold", (0.99, 0.9, 0.7, 0.5)),
    "hierarchy": ("low_threshold", (0.9, 0.7, 0.5, 0.3)),
    "variation-bound": ("delta", (0.0, 0.01, 0.05, 0.1, 0.2)),
    "dependency": ("budget", (0.01, 0.05, 0.2, 1.0)),
    "token-editing": ("threshold", (0.95, 0.8, 0.6, 0.4, 0.2)),
    "soft-tokens": ("threshold", (0.95, 0.8, 0.6, 0.4, 0.2)),
}


def sweep(rule: str, values: Sequence[float] | None = None) -> list[tuple[float, str]]:
    """Lists the settings of a sweep.

    Args:
        rule: a name of `SWEEPS`.
        values: of its knob; None is those of `SWEEPS`.

    Returns:
        Each value with the rule as `decode` reads it.

    Raises:
        ArgumentError: there is no sweep of that name, or there are no values.

    >>> sweep("quota", [1, 4])
    [(1, 'quota:per_step=1'), (4, 'quota:per_step=4')]
    """
    if rule not in SWEEPS:
        raise ArgumentError(f"no sweep of the rule {rule!r}; there are {', '.join(SWEEPS)}")
    knob, usual = SWEEPS[rule]
    chosen = usual if values is None else values
    if not chosen:
        raise ArgumentError(f"a sweep of {rule} needs at least one value of {knob}")
    return [(value, f"{rule}:{knob}={value}") for value in chosen]


def curve(
    measure: Callable[[str], Sequence[Mapping[str, Any]]], rule: str, values: Sequence[float] | None = None
) -> list[dict[str, Any]]:
    """Measures a rule at several settings of its knob.

    Args:
        measure: called with a rule as text, returns the rows of its tasks: ``accuracy`` (a fraction), ``num``,
            ``tokens``, ``answer_tokens``, ``forwards``, ``tokens_denoise``, ``forwards_denoise``, ``certificate`` and
            ``seconds``, as `parallelbench.runner.run` returns them.
        rule: a name of `SWEEPS`.
        values: as in `sweep`.

    Returns:
        A flat row per value: ``sweep knob value rule tasks num accuracy tokens_per_forward tokens_per_forward_all
        answer_tokens_per_forward certificate seconds``. Accuracy is the mean over the tasks. Tokens and forwards are
        sums, and the certificate is the largest.

    Raises:
        ArgumentError: as in `sweep`, or `measure` returned no rows.

    >>> counts = dict(num=9, tokens=8, answer_tokens=6, forwards=2, tokens_denoise=8, forwards_denoise=2)
    >>> row = counts | dict(accuracy=1.0, certificate=0.0, seconds=1.0)
    >>> points = curve(lambda rule: [row], "quota", [4])
    >>> points[0]["tokens_per_forward_all"], points[0]["answer_tokens_per_forward"]
    (4.0, 3.0)
    """
    knob, points = SWEEPS.get(rule, ("", ()))[0], []
    for value, text in sweep(rule, values):
        rows = list(measure(text))
        if not rows:
            raise ArgumentError(f"measuring {text} gave no rows; ask for at least one task")
        points.append({"sweep": rule, "knob": knob, "value": value, "rule": text} | _together(rows))
    return points


def scores(points: Sequence[Mapping[str, Any]], *, best: float | None = None) -> list[dict[str, Any]]:
    """Computes the AUP of every sweep, with the answers' tokens over all forwards.

    Ends of text after an answer do not count as tokens, and every forward counts the same, as on d3LLM's leaderboard.

    Args:
        points: rows of `curve`, of one or several rules.
        best: the highest accuracy known, a fraction; None is the highest of the points.

    Returns:
        A flat row per sweep, the best first: ``sweep aup points``.

    Raises:
        ArgumentError: there are no points, or an accuracy is not a fraction.

    >>> scores([{"sweep": "quota", "answer_tokens_per_forward": 1.0, "accuracy": 0.5}])
    [{'sweep': 'quota', 'aup': 50.0, 'points': 1}]
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        pair = (point["answer_tokens_per_forward"], 100.0 * point["accuracy"])
        curves.setdefault(point["sweep"], []).append(pair)
    board = aup_board(curves, best=None if best is None else 100.0 * best)
    rows = [{"sweep": name, "aup": area, "points": len(curves[name])} for name, area in board.items()]
    return sorted(rows, key=lambda row: -row["aup"])


def _together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = {name: sum(row[name] for row in rows) for name in ("num", "tokens", "answer_tokens", "forwards", "seconds")}
    denoise = sum(row["tokens_denoise"] for row in rows), sum(row["forwards_denoise"] for row in rows)
    bounds = [row["certificate"] for row in rows]
    return {
        "tasks": len(rows),
        "num": total["num"],
        "accuracy": sum(row["accuracy"] for row in rows) / len(rows),
        "tokens_per_forward": denoise[0] / denoise[1] if denoise[1] else 0.0,
        "tokens_per_forward_all": total["tokens"] / total["forwards"],
        "answer_tokens_per_forward": total["answer_tokens"] / total["forwards"],
        "certificate": None if None in bounds else max(bounds),
        "seconds": total["seconds"],
    }
