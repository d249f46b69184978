"""Turns a chat into tokens, with what its messages quote of special tokens, such as a mask, read as plain text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from partsong.errors import ArgumentError

__all__ = ["chat_ids", "quoting_ids", "special_texts"]

#: Characters that no text in use has; they mark places in a template's text.
_OPEN, _CLOSE = "\ue5f0", "\ue5f1"
_PLACE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


def special_texts(tokenizer: Any) -> list[str]:
    """Returns the texts of a tokenizer's special tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    texts = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return sorted(filter(None, texts), key=lambda text: (-len(text), text))


def chat_ids(
    tokenizer: Any,
    chat: Sequence[Mapping[str, str]],
    *,
    roles: Collection[str] = ("system", "user", "assistant", "tool"),
    **options: Any,
) -> list[int]:
    """Returns the tokens of a chat as the model's template writes it.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        chat: messages with ``role`` and ``content``.
        roles: whose messages quote special tokens; those of other roles are read as the tokenizer reads them.
        **options: arguments of ``apply_chat_template``.

    Raises:
        ArgumentError: the tokenizer cannot write what a message quotes as text.
        TemplateError, ValueError: the template refuses the chat.
    """
    special = re.compile("|".join(map(re.escape, special_texts(tokenizer))) or "(?!)")
    quoted: list[str] = []

    def mark(match: re.Match[str]) -> str:
        quoted.append(match[0])
        return f"{_OPEN}{len(quoted) - 1}{_CLOSE}"

    marked = [
        {**message, "content": special.sub(mark, _PLACE.sub("", message["content"]))}
        if message["role"] in roles
        else message
        for message in chat
    ]
    if not quoted:
        return list(tokenizer.apply_chat_template(chat, **{"return_dict": False, **options, "tokenize": True}))
    text = tokenizer.apply_chat_template(marked, **{**options, "tokenize": False})
    pieces = _PLACE.split(text)  # in turns a text, and the number of a quote
    ids = [_plain(tokenizer, piece) for piece in pieces]
    for at in range(1, len(pieces), 2):
        ids[at] = _as_text(tokenizer, quoted[int(pieces[at])])
    return [token for piece in ids for token in piece]


def quoting_ids(tokenizer: Any, text: str, quoted: str | None) -> list[int]:
    """Returns the tokens of a text in which one special token's text is plain text.

    Args:
        tokenizer: a transformers tokenizer.
        text: the text.
        quoted: the special token's text; None quotes nothing.

    Raises:
        ArgumentError: the tokenizer cannot write it as text.
    """
    if not quoted or quoted not in text:
        return _plain(tokenizer, text)
    first, *rest = text.split(quoted)
    ids = _plain(tokenizer, first)
    for piece in rest:
        ids += [*_as_text(tokenizer, quoted), *_plain(tokenizer, piece)]
    return ids


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []


def _as_text(tokenizer: Any, quoted: str) -> list[int]:
    """Returns the tokens of a special token's text, none of which is special but the one for unknown words."""
    special = tokenizer.convert_tokens_to_ids(quoted)
    for parts in ((quoted,), (quoted[:1], quoted[1:])):  # in two where the tokenizer knows it as a whole only
        ids = [
            token
            for part in filter(None, parts)
            for token in tokenizer(part, add_special_tokens=False, split_special_tokens=True).input_ids
        ]
        if special not in ids:
            return ids
    raise ArgumentError(f"a message quotes {quoted!r}, which the tokenizer cannot write as text: leave it out")
