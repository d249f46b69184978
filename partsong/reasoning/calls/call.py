"""A call of a language model: what is asked, what comes back, and which earlier calls the question was made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from partsong.reasoning.calls.text_tree import Part, Piece, flat_text, pieces_of, shape_of

__all__ = ["Completion", "Message", "Parameters", "Piece", "Request", "Usage"]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat, put together from plain text and from pieces of earlier answers.

    A last message of the assistant's is gone on with, and may hold forks: text that parts into threads and comes
    together again. `LocalEngine` then lets each token see what the forks say and computes nothing twice; an engine that
    knows no forks reads `text`, the threads one behind the other.

    Attributes:
        role: "system", "user" or "assistant".
        pieces: in order; their sources are what a call with this message depends on.

    >>> Message("user", ("Check this: ", Piece("4", "c1"))).text
    'Check this: 4'
    """

    role: Literal["system", "user", "assistant"]
    pieces: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The message as it reads from beginning to end."""
        return flat_text(self.pieces)

    @property
    def sources(self) -> tuple[str, ...]:
        """Ids of the calls whose text is in here, each once."""
        return tuple(dict.fromkeys(piece.source for piece in pieces_of(self.pieces) if piece.source))


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """How an answer is drawn.

    Attributes:
        max_tokens: most tokens of an answer, the hidden reasoning among them.
        temperature: 0 takes the most likely tokens.
        top_p: nucleus; 1.0 is all.
        stop: strings that end an answer.
        logprobs: alternatives to report log-probabilities for at every token; 0 is none.
    """

    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One call, complete: the same request gives the same answer wherever and whenever it is made.

    Attributes:
        messages: the chat so far.
        parameters: of the draw.
        path: the branch it belongs to, such as ``("round 1", "draft")``; tells equal prompts apart.
        sample: which of several samples of that branch this is.
        seed: of its random stream; a function of the run's seed and of everything above.
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
        said = json.dumps([chat, asdict(self.parameters), self.path, self.sample, self.seed], ensure_ascii=False)
        return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    @property
    def sources(self) -> tuple[str, ...]:
        """Ids of the calls this one's prompt was made of, each once."""
        return tuple(dict.fromkeys(source for message in self.messages for source in message.sources))


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens of a call.

    Attributes:
        prompt: tokens of the prompt.
        cached: of those, tokens whose keys were there already.
        completion: tokens of the answer, hidden reasoning among them.
        wasted: tokens that attempts which failed had written before this one.
        reported: by the engine; False is our own estimate.
    """

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    wasted: int = 0
    reported: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What came back.

    Attributes:
        text: the answer, without hidden reasoning.
        reasoning: hidden reasoning, where the engine tells it apart.
        finish: "stop", the model ended; "length", the tokens ran out, so this is no answer; "halted", whoever asked
            had read enough of it; "cancelled", nobody needed it any more.
        usage: tokens.
        logprobs: of the drawn tokens, natural; None where none were asked for.
        confidence: by token, the mean of minus the log-probabilities of the alternatives asked for; or None.
        source: id of the call.
        tokens: ids of the tokens of the text, where the engine knows them; who goes on with the text reads these.
    """

    text: str
    finish: Literal["stop", "length", "halted", "cancelled"] = "stop"
    usage: Usage = field(default_factory=Usage)
    reasoning: str = ""
    logprobs: tuple[float, ...] | None = None
    confidence: tuple[float, ...] | None = None
    source: str = ""
    tokens: tuple[int, ...] | None = None

    @property
    def piece(self) -> Piece:
        """The answer as a piece of another prompt."""
        return Piece(self.text, self.source, self.tokens)

    def as_json(self) -> dict[str, Any]:
        """For a journal; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Completion:
        """What `as_json` wrote."""
        lists = {name: _tuple(said.get(name)) for name in ("logprobs", "confidence", "tokens")}
        return cls(**{**said, **lists, "usage": Usage(**said["usage"])})


def _tuple(values: Iterable[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)
