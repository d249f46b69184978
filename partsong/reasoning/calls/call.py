"""Describes a call of a language model: the request, the completion, and the earlier calls it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from partsong.reasoning.calls.text_tree import Part, Piece, flat_text, pieces_of, shape_of
from partsong.whole_text import whole_text

__all__ = ["Completion", "Message", "Parameters", "Piece", "Request", "Usage"]


@dataclass(frozen=True, slots=True)
class Message:
    """Holds a message of a chat, put together from plain text, cleaned of half characters, and from earlier answers.

    If the last message is the assistant's, the model continues it. It may hold forks: text that splits into threads and
    joins them again. `LocalEngine` then lets each token see what the forks allow and computes nothing twice. An
    engine that knows no forks reads `text`, the threads one after the other.

    Attributes:
        role: "system", "user" or "assistant".
        pieces: the text, in order. A call with this message depends on the sources of its pieces.

    >>> Message("user", ("Check this: ", Piece("4", "c1"))).text
    'Check this: 4'
    """

    role: Literal["system", "user", "assistant"]
    pieces: tuple[Part, ...]

    def __post_init__(self) -> None:
        pieces = tuple(whole_text(part) if isinstance(part, str) else part for part in self.pieces)
        object.__setattr__(self, "pieces", pieces)

    @property
    def text(self) -> str:
        """Returns the text of the message from beginning to end."""
        return flat_text(self.pieces)

    @property
    def sources(self) -> tuple[str, ...]:
        """Returns the ids of the calls whose text is in the message, each once."""
        return tuple(dict.fromkeys(piece.source for piece in pieces_of(self.pieces) if piece.source))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Says how an answer is drawn.

    Attributes:
        max_tokens: most tokens of an answer, hidden reasoning included.
        temperature: 0 takes the most likely tokens.
        top_p: share of the probability that tokens are drawn from; 1.0 draws from all.
        stop: strings that end an answer. Within hidden reasoning they do not count.
        stop_in_thoughts: whether they count there too, for methods that write thoughts in steps or threads.
        logprobs: alternatives to report log-probabilities for at every token; 0 reports nothing.
    """

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    stop_in_thoughts: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Describes one call completely: the same request always gives the same answer.

    Attributes:
        messages: the chat so far.
        parameters: how the answer is drawn.
        path: the branch the call belongs to, such as ``("round 1", "draft")``; distinguishes equal prompts.
        sample: which of several samples of that branch this is.
        seed: seed of its random stream; a function of the run's seed and of everything above.
    """

    messages: tuple[Message, ...]
    parameters: Parameters = field(default_factory=Parameters)
    path: tuple[str, ...] = ()
    sample: int = 0
    seed: int = 0

    @property
    def key(self) -> str:
        """Names this call: a function of prompt, parameters, path and sample, never of order or concurrency."""
        chat = [(message.role, shape_of(message.pieces)) for message in self.messages]
        drawn = asdict(self.parameters)
        if not self.parameters.stop_in_thoughts:  # so the names of calls in older journals stay
            del drawn["stop_in_thoughts"]
        text = json.dumps([chat, drawn, self.path, self.sample, self.seed], ensure_ascii=False)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def sources(self) -> tuple[str, ...]:
        """Returns the ids of the calls whose text is in the prompt, each once."""
        return tuple(dict.fromkeys(source for message in self.messages for source in message.sources))


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Counts the tokens of a call.

    Attributes:
        prompt: tokens of the prompt.
        cached: tokens of the prompt whose keys were there already.
        completion: tokens of the answer, hidden reasoning included.
        wasted: tokens that earlier attempts had written when they failed.
        drafted: tokens that were guessed ahead and verified, where the engine speculates.
        rejected: how many of these did not become part of the answer.
        reported: whether the engine counted them; False is an estimate.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    wasted: int = 0
    drafted: int = 0
    rejected: int = 0
    reported: bool = True

    def after(self, cut: Usage, *, is_cut: bool) -> Usage:
        """Adds the cost of an earlier attempt at the same call that was cut off.

        Args:
            cut: usage of the earlier attempt.
            is_cut: whether this one was cut off too, so that both are tokens of a call without an answer.
        """
        kept, lost = (cut.completion, cut.wasted) if is_cut else (0, cut.completion + cut.wasted)
        return replace(
            self,
            prompt=self.prompt + cut.prompt,
            cached=self.cached + cut.cached,
            completion=self.completion + kept,
            wasted=self.wasted + lost,
            drafted=self.drafted + cut.drafted,
            rejected=self.rejected + cut.rejected,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Holds the result of a call; its texts are cleaned of half characters.

    Attributes:
        text: the answer, without hidden reasoning.
        reasoning: hidden reasoning, where the engine separates it from the answer.
        finish: "stop" if the model ended its text; "length" if the tokens ran out, so that this is no answer; "halted"
            if the caller had read enough; "cancelled" if the answer was no longer needed.
        usage: token counts.
        logprobs: natural log-probabilities of the drawn tokens; None where they were not asked for.
        confidence: by token, the mean of minus the log-probabilities of the alternatives asked for, or None.
        source: id of the call.
        tokens: ids of the tokens of the text, where the engine knows them; a call that continues the text reads these.
    """

    text: str
    finish: Literal["stop", "length", "halted", "cancelled"] = "stop"
    usage: Usage = field(default_factory=Usage)
    reasoning: str = ""
    logprobs: tuple[float, ...] | None = None
    confidence: tuple[float, ...] | None = None
    source: str = ""
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("text", "reasoning"):
            object.__setattr__(self, name, whole_text(getattr(self, name)))

    @property
    def piece(self) -> Piece:
        """Returns the answer as a piece of another prompt."""
        return Piece(self.text, self.source, self.tokens)

    def as_json(self) -> dict[str, Any]:
        """Returns the completion in JSON form, for a journal; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Completion:
        """Reads what `as_json` wrote."""
        names = ("logprobs", "confidence", "tokens")
        lists = {name: tuple(record[name]) for name in names if record.get(name) is not None}
        return cls(**{**record, **lists, "usage": Usage(**record["usage"])})
