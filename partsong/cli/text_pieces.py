"""Spells what every token adds to a text, for drawings of a text that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Pieces"]


class Pieces:
    """Returns the text that each token adds.

    A token is spelled together with the one before it, so that spaces between words are those of the tokenizer.
    Tokens that are only parts of characters are spelled together.

    Args:
        tokenizer: of the model.
        before: the token before the first one, or None.
        mask: the token at undecided positions, or None.
        block: what to show there.
    """

    def __init__(self, tokenizer: Any, before: int | None, mask: int | None, block: str) -> None:
        self.tokenizer, self.before, self.mask, self.block = tokenizer, before, mask, block
        self.mask_text = "" if mask is None else tokenizer.decode([mask]).strip()
        self.known: dict[tuple[int | None, int], str] = {}

    def __call__(self, tokens: Sequence[int | None]) -> list[str]:
        """Returns a piece of text for every token; a token is None where it is undecided."""
        pieces: list[str] = []
        last = self.before
        for token in tokens:
            shown = self.mask if token is None else token
            if shown is None:
                pieces.append(self.block)
                continue
            piece = self._after(last, shown)
            if token is None:
                piece = piece.replace(self.mask_text, self.block) if self.mask_text else self.block
            pieces.append(piece)
            last = shown
        return self._whole(pieces, tokens)

    def _after(self, last: int | None, token: int) -> str:
        if (last, token) not in self.known:
            start = "" if last is None else self.tokenizer.decode([last])
            both = self.tokenizer.decode([token] if last is None else [last, token])
            # Some tokenizers spell a token differently when another follows it.
            piece = both.removeprefix(start) if both.startswith(start) else self.tokenizer.decode([token])
            self.known[last, token] = piece
        return self.known[last, token]

    def _is_part(self, token: int | None) -> bool:
        return token is not None and "\N{REPLACEMENT CHARACTER}" in self._after(None, token)

    def _whole(self, pieces: list[str], tokens: Sequence[int | None]) -> list[str]:
        """Spells each run of tokens that are parts of characters as one piece, assigned to its first token."""
        start = 0
        while start < len(pieces):
            end = start
            while end < len(pieces) and self._is_part(tokens[end]):
                end += 1
            if end > start:
                pieces[start:end] = [self.tokenizer.decode(list(tokens[start:end])), *[""] * (end - start - 1)]
            start = max(end, start + 1)
        return pieces
