"""Measures how early votes can stop without loss: ``python benchmarks/thinking/votes.py``.

It simulates votes of 64 samples of different lengths. Each vote is counted to its end, and is also stopped as early as
`Ballot.decided` allows: with samples drawn one after another, and with all of them running at once and the rest
cancelled.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong.reasoning.answers.votes import Ballot

#: Probabilities of the right answer; the wrong ones share the rest, and None draws the probability.
SHARES = (0.3, 0.5, 0.7, 0.9, None)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says how many votes to simulate."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    votes: int = 100_000
    """Votes in all."""
    samples: int = 64
    """Samples of a vote."""
    wrong: int = 6
    """How many wrong answers there are."""
    spoilt: float = 0.05
    """Share of samples without an answer."""
    spread: float = 0.5
    """Standard deviation of the logarithm of the lengths."""
    seed: int = 0
    """Seed of all draws."""


def _stopped(answers: list[str | None], order: list[int]) -> tuple[int, str | None]:
    """Returns after how many samples of an order the vote is decided, and for which answer."""
    ballot, missing = Ballot(len(answers)), set(range(len(answers)))
    for count, number in enumerate(order, 1):
        ballot.add(number, answers[number])
        missing.discard(number)
        if ballot.decided(missing):
            return count, ballot.leader
    raise AssertionError("a complete vote is decided")


def _vote(config: Config, draw: random.Random, share: float | None) -> dict[str, Any]:
    right = draw.uniform(0.3, 1.0) if share is None else share
    answers: list[str | None] = []
    for _ in range(config.samples):
        name = "right" if draw.random() < right else f"wrong {draw.randrange(config.wrong)}"
        answers.append(None if draw.random() < config.spoilt else name)
    lengths = [draw.lognormvariate(0.0, config.spread) for _ in answers]
    whole = Ballot(config.samples)
    for number, answer in enumerate(answers):
        whole.add(number, answer)
    one_by_one, first = _stopped(answers, list(range(config.samples)))
    by_end = sorted(range(config.samples), key=lengths.__getitem__)
    at_once, second = _stopped(answers, by_end)
    last = lengths[by_end[at_once - 1]]
    return {
        "same": first == second == whole.leader,
        "sequential": 1 - sum(lengths[:one_by_one]) / sum(lengths),
        "critical": 1 - last / max(lengths),
        "parallel": 1 - sum(min(length, last) for length in lengths) / sum(lengths),
    }


def main(config: Config) -> None:
    """Votes and writes the files."""
    draw, rows = random.Random(config.seed), []
    for share in SHARES:
        votes = [_vote(config, draw, share) for _ in range(config.votes // len(SHARES))]
        mean = {name: sum(vote[name] for vote in votes) / len(votes) for name in ("sequential", "critical", "parallel")}
        name = "0.3 to 1, evenly" if share is None else f"{share:g}"
        rows.append({"share": name, "votes": len(votes), "same": sum(vote["same"] for vote in votes), **mean})
    note = (
        f"{config.samples} samples a vote, the share of the most likely answer as given, {config.wrong} wrong answers, "
        f"{config.spoilt:.0%} spoilt, lengths lognormal with sigma {config.spread}. Saved: tokens where samples are "
        "drawn one after another; the longest chain, and tokens, where all are under way and the rest is cancelled."
    )
    columns = ("share of the leader", "votes", "same winner", "tokens, one by one", "critical path", "tokens, at once")
    lines = [
        (row["share"], row["votes"], row["same"], *(f"{row[n]:.1%}" for n in ("sequential", "critical", "parallel")))
        for row in rows
    ]
    file_result(config.out, __file__, rows, "The lossless stop", note, markdown_table(columns, lines))


if __name__ == "__main__":
    main(tyro.cli(Config))
