"""Defines drafters: they guess the next tokens of texts, and see the result of the verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from partsong.kernels.keyed_draw import TokenDraw
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.match import Match

__all__ = ["ClosingDrafter", "DraftText", "Drafter", "DrafterKnobs", "Observation", "PromptReader"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class DraftText:
    """Holds a text that is being written.

    Attributes:
        tokens: the tokens of the prompt and of the answer so far. Threads of a prompt follow one another.
        draw: how the next token is drawn. A drafter that draws with the same noise is right more often.
        plain: whether the tokens are one text, at positions 0, 1, 2, ..., as another model can read them.
    """

    tokens: list[int]
    draw: TokenDraw
    plain: bool = True


@dataclass(frozen=True, slots=True)
class Observation:
    """Holds the outcome of a draft.

    Attributes:
        draft: the verified draft, with guesses of other drafters.
        match: the accepted nodes, and the model's own token at every node.
        hidden: the model's states at every node and mask, `[draft.num_rows, layers, hidden size]`, for a drafter that
            asked.
    """

    draft: DraftTree
    match: Match
    hidden: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Guesses the next tokens of texts.

    The text is that of plain decoding for any guesses; only its speed depends on them.
    """

    #: The layers whose states it needs; 0 is the embedding, -1 the input of the head.
    layers: tuple[int, ...]
    #: How many masks it needs after a token, whose states it then sees (see `DraftTree`). The model must support them.
    masks: int

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses what follows each text, at most `rooms` tokens deep."""
        ...

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns from a step's outcome; the text holds the new tokens already. A text's first step has an empty draft.

        With masks there is a step before it, which read the prompt and gave the first token.
        """
        ...

    def forget(self, text: DraftText) -> None:
        """Forgets a text that has ended."""
        ...


@runtime_checkable
class PromptReader(Protocol):
    """Is a drafter that wants the states of a text's prompt as well."""

    def read_prompt(self, text: DraftText, states: Tensor) -> None:
        """Takes in the states before a text's last token, `[tokens, layers, hidden size]`, as far back as they go."""
        ...


@runtime_checkable
class ClosingDrafter(Protocol):
    """Is a drafter that holds something, such as another rank's attention, until it is closed."""

    def close(self) -> None:
        """Gives it back; nothing is proposed afterwards."""
        ...


@runtime_checkable
class DrafterKnobs(Protocol):
    """Describes a drafter before there is a model for it."""

    def validate(self) -> None:
        """Checks the knobs.

        Raises:
            ArgumentError: one is out of bounds.
        """
        ...

    def build(self, model: Any, tokenizer: Any) -> Drafter:
        """Makes the drafter for a model.

        Raises:
            UnsupportedError: it cannot draft for this model.
        """
        ...
