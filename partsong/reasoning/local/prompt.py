"""A chat as the tokens a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Message
from partsong.reasoning.calls.text_tree import has_fork, pieces_of
from partsong.reasoning.threads.layout import TokenRun, Tokens, check_fork, encoded

__all__ = ["Prompt", "prompt_ids", "prompt_of"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call reads.

    Attributes:
        parts: runs of tokens, and forks of them.
        goes_on: whether it is a text the model was writing, whose keys ought to be there to the last token.
        num_tokens: of all threads together.
        end: position behind the last token.
        mark: thought embedding of what is written now.
    """

    parts: Tokens
    goes_on: bool
    num_tokens: int
    end: int
    mark: int = 0


def prompt_of(tokenizer: Any, messages: Sequence[Message]) -> Prompt:
    """The tokens of a chat.

    A last message of the assistant's that has forks, or pieces with the tokens they were drawn with, stands behind the
    beginning of an answer as the model's template writes it, and keeps those tokens. Else see `prompt_ids`.

    A text that ends in a fork of one thread goes on inside that thread. Forks of other messages are read as text.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the chat.

    Raises:
        ArgumentError: what `prompt_ids` refuses, a fork without threads, or no text behind the threads of the last one.
    """
    last = messages[-1] if messages else None
    pieces = () if last is None or last.role != "assistant" else last.pieces
    if not has_fork(pieces) and all(piece.tokens is None for piece in pieces_of(pieces)):
        ids = prompt_ids(tokenizer, messages)
        return Prompt((TokenRun(tuple(ids)),), last is not None and last.role == "assistant", len(ids), len(ids))
    head = TokenRun(tuple(prompt_ids(tokenizer, messages[:-1])))
    parts = (head, *encoded(pieces, lambda text: tokenizer(text, add_special_tokens=False).input_ids))
    num_tokens, end, mark = _measured(parts)
    if mark is None:
        raise ArgumentError("the last message ends where threads come together: say what the text goes on with")
    return Prompt(parts, True, num_tokens, end, mark)


def _measured(parts: Tokens, start: int = 0, mark: int = 0) -> tuple[int, int, int | None]:
    """Tokens of a text, the position behind it, and the mark of what follows; None where nothing can follow."""
    count, end, last = 0, start, mark
    for part in parts:
        if isinstance(part, TokenRun):
            count, end = count + len(part.tokens), end + len(part.tokens)
            last = mark if part.tokens else last
        elif not part.apart:
            check_fork(part)
            found = [_measured(thread, end, part.mark(i) or mark) for i, thread in enumerate(part.threads)]
            count, end = count + sum(each[0] for each in found), max(each[1] for each in found)
            last = found[0][2] if len(found) == 1 else None
    return count, end, last


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat.

    A model with a chat template reads what its template makes, with the beginning of an answer behind it; where the
    last message is an assistant's, the model goes on with that one. A model without a template, a base model, reads
    the messages' texts with an empty line between them, but for an assistant's at the end, which stands behind the
    others as the model's own answer does.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the chat.

    Raises:
        ArgumentError: no text at all, or a chat the template refuses.
    """
    if not messages:
        raise ArgumentError("a request needs at least one message")
    if not getattr(tokenizer, "chat_template", None):
        texts = [message.text for message in messages]
        answer = texts.pop() if messages[-1].role == "assistant" else ""
        ids = tokenizer("\n\n".join(texts) + answer).input_ids
    else:
        chat = [{"role": message.role, "content": message.text} for message in messages]
        goes_on = messages[-1].role == "assistant"
        try:
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=not goes_on, continue_final_message=goes_on, return_dict=False
            )
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ArgumentError(f"the model's chat template refuses a chat of {roles}: {error}") from error
    if not ids:
        raise ArgumentError("the prompt has no tokens: give a message with text")
    return list(ids)
