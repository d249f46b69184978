"""A chat as the token ids a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from partsong.errors import ArgumentError
from partsong.reasoning.call import Message

__all__ = ["prompt_ids"]


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat.

    A model with a chat template reads what its template makes, with the beginning of an answer behind it; where the
    last message is an assistant's, the model goes on with that one. A model without a template, a base model, reads
    the messages' texts with an empty line between them.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the chat.

    Raises:
        ArgumentError: no text at all, or a chat the template refuses.
    """
    if not messages:
        raise ArgumentError("a request needs at least one message")
    if not getattr(tokenizer, "chat_template", None):
        ids = tokenizer("\n\n".join(message.text for message in messages)).input_ids
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
