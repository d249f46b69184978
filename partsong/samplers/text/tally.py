"""Counts what decoding costs: forwards by kind, the tokens they decided, and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from partsong import ledger

__all__ = ["KINDS", "Tally"]

#: What a forward is for. "prefill" is the first of a text with a cache, "refresh" a later one of everything, "denoise"
#: any other that looks at undecided positions, "verify" one that checks, "store" one that only stores keys.
KINDS = ("prefill", "refresh", "denoise", "verify", "store")


@dataclass(slots=True)
class Tally:
    """Holds the counts of one text.

    Attributes:
        forwards: forwards by kind.
        tokens: tokens of the finished text, by the kind of the forward that decided them. Given tokens do not count,
            nor does what was decided after the end.
        rows: rows of all forwards: one each, and with `verify` another for each drafted step that is checked.
        drafted: tokens of all drafts.
        rejected: drafted tokens that the rule did not choose.
        edits: tokens changed or taken back later.
        flops: operations of all forwards, with the head at the positions it was asked for.
        full_flops: operations of one forward of the whole text, with the head at every position to decide.
        certificate: nats, the sum over steps of the accepted entropies but the largest: a bound on the divergence
            from one-token-at-a-time decoding in the same order, under the model's own conditionals at temperature 1;
            None with rules that revise or that choose by the drawn token, and where the model could not go on.
        variation: 0 or more, the sum over steps of the total variation that the rule allowed, as far as the
            dependences it read are right; None with rules that compute none, and where the model could not go on.
            Its mean over texts bounds the total variation of their distribution from that of one token at a time.
    """

    forwards: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    rows: int = 0
    drafted: int = 0
    rejected: int = 0
    edits: int = 0
    flops: float = 0.0
    full_flops: float = 0.0
    certificate: float | None = 0.0
    variation: float | None = None

    @property
    def num_forwards(self) -> int:
        """Counts the forwards of all kinds."""
        return sum(self.forwards.values())

    @property
    def num_tokens(self) -> int:
        """Counts all decided tokens."""
        return sum(self.tokens.values())

    @property
    def tokens_per_forward(self) -> float:
        """Divides the tokens of the denoising forwards by those forwards; other kinds are left out of both."""
        return self.tokens["denoise"] / self.forwards["denoise"] if self.forwards["denoise"] else 0.0

    @property
    def tokens_per_forward_all(self) -> float:
        """Divides all tokens by all forwards."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

    @property
    def tokens_per_full_forward(self) -> float:
        """Weights forwards by arithmetic: tokens per number of operations in one forward of the whole text."""
        return self.num_tokens * self.full_flops / self.flops if self.flops else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it, for machine-readable results."""
        return {
            "forwards": dict(self.forwards),
            "rows": self.rows,
            "tokens_drafted": self.drafted,
            "tokens_rejected": self.rejected,
            "tokens": self.num_tokens,
            "tokens_per_forward": self.tokens_per_forward,
            "tokens_per_forward_all": self.tokens_per_forward_all,
            "tokens_per_full_forward": self.tokens_per_full_forward,
            "flops": self.flops,
            "edits": self.edits,
            "certificate": self.certificate,
            "variation": self.variation,
        }


def count(tallies: list[Tally], kind: str, flops: list[float]) -> None:
    """Notes a forward in the tallies of its rows and in the active ledger; several rows may be of one text."""
    counted: set[int] = set()
    for tally, amount in zip(tallies, flops, strict=True):
        tally.forwards[kind] += id(tally) not in counted
        counted.add(id(tally))
        tally.rows += 1
        tally.flops += amount
    ledger.count(forwards=1, flops=sum(flops))
