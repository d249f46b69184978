"""Turns a chat into the tokens a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Message
from partsong.reasoning.calls.text_tree import has_fork, pieces_of
from partsong.reasoning.local.chat_tokens import chat_ids
from partsong.reasoning.threads.layout import TokenRun, Tokens, check_fork, encoded

__all__ = ["Prompt", "prompt_ids", "prompt_of"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Describes what a call reads.

    Attributes:
        parts: runs of tokens, and forks of them.
        goes_on: whether the model wrote this text itself, so that its keys should be there up to the last token.
        num_tokens: how many tokens all threads have together.
        end: the position after the last token.
        mark: thought embedding of what is written next.
    """

    parts: Tokens
    goes_on: bool
    num_tokens: int
    end: int
    mark: int = 0


def prompt_of(tokenizer: Any, messages: Sequence[Message]) -> Prompt:
    """Turns a chat into tokens.

    A last message by the assistant may have forks, or pieces with the tokens they were drawn with. It then follows the
    beginning of an answer as the model's template writes it, and keeps those tokens. For other chats see `prompt_ids`.

    A text that ends in a fork of one thread continues inside that thread. Forks of other messages are read as text.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the chat.

    Raises:
        ArgumentError: the chat is one that `prompt_ids` refuses, a fork has no threads, or no text follows the last
            fork's threads.
    """
    last = messages[-1] if messages else None
    pieces = () if last is None or last.role != "assistant" else last.pieces
    if not has_fork(pieces) and all(piece.tokens is None for piece in pieces_of(pieces)):
        ids = prompt_ids(tokenizer, messages)
        return Prompt((TokenRun(tuple(ids)),), last is not None and last.role == "assistant", len(ids), len(ids))
    head = TokenRun(tuple(prompt_ids(tokenizer, messages[:-1])))
    parts = (head, *encoded(pieces, lambda text: tokenizer(text, add_special_tokens=False).input_ids))
    num_tokens, end, mark = _measure(parts)
    if mark is None:
        raise ArgumentError("the last message ends where threads come together: add the text that follows them")
    return Prompt(parts, True, num_tokens, end, mark)


def _measure(parts: Tokens, start: int = 0, mark: int = 0) -> tuple[int, int, int | None]:
    """Counts a text's tokens; also returns the position after it and the mark of what may follow, if there is one."""
    count, end, last = 0, start, mark
    for part in parts:
        if isinstance(part, TokenRun):
            count, end = count + len(part.tokens), end + len(part.tokens)
            last = mark if part.tokens else last
        elif not part.apart:
            check_fork(part)
            threads = [_measure(thread, end, part.mark(i) or mark) for i, thread in enumerate(part.threads)]
            count, end = count + sum(each[0] for each in threads), max(each[1] for each in threads)
            last = threads[0][2] if len(threads) == 1 else None
    return count, end, last


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Returns the token ids of a chat.

    A model with a chat template reads what its template makes, followed by the beginning of an answer. If the last
    message is an assistant's, the model continues that one. A base model, which has no template, reads the messages'
    texts with an empty line between them. An assistant's message at the end then follows the others directly, as the
    model's own answer does. For a model with a template, a special token that a message by others quotes, such as
    ``<|im_end|>``, is text.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the chat.

    Raises:
        ArgumentError: there is no text at all, or the template refuses the chat.
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
            # What the model wrote itself may hold special tokens, such as the tags of threads.
            ids = chat_ids(
                tokenizer,
                chat,
                roles=("system", "user"),
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
            )
        except ArgumentError:
            raise
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ArgumentError(f"the model's chat template refuses a chat of {roles}: {error}") from error
    if not ids:
        raise ArgumentError("the prompt has no tokens: give a message with text")
    return list(ids)
