"""Counts how many tokens steps with guesses gave, by how far into the answer they were.

Drafters may get worse far into a long text (test-time speculation, arXiv 2605.09329), which an average hides.
"""

from __future__ import annotations

__all__ = ["AcceptedLengths"]

#: Tokens of an answer that are counted together.
_SPAN = 500


class AcceptedLengths:
    """Counts steps and their tokens.

    >>> lengths = AcceptedLengths()
    >>> lengths.see(0, 4), lengths.see(4, 2), lengths.see(1200, 3)
    (None, None, None)
    >>> lengths.means()
    {0: 3.0, 1000: 3.0}
    """

    def __init__(self) -> None:
        self._spans = dict[int, tuple[int, int]]()

    def see(self, place: int, tokens: int) -> None:
        """Counts a step.

        Args:
            place: how many tokens of the answer were drawn before it.
            tokens: how many tokens it gave: the guesses that were right, and the model's own token after them.
        """
        begin = place // _SPAN * _SPAN
        steps, total = self._spans.get(begin, (0, 0))
        self._spans[begin] = steps + 1, total + tokens

    def means(self) -> dict[int, float]:
        """Returns tokens per step by where a span of 500 tokens of the answers begins."""
        return {begin: total / steps for begin, (steps, total) in sorted(self._spans.items())}
