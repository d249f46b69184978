"""Builds the `products` model: a tokenizer of digits, signs and tags, and a stock Llama. Importing this loads torch."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Regex, normalizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from partsong_zoo.chat_model import CONTEXT, EOS, MODEL, PAD, USER, Words, chat_llama
from partsong_zoo.folders import save_folder

__all__ = ["CONTEXT", "EOS", "MODEL", "PAD", "USER", "VOCABULARY", "build_model", "build_tokenizer", "encode"]

_NAMES = (
    *("Parallel", "Goal", "Outline", "Path", "Conclusion", "Outlines", "Thread", "guideline", "plan", "step"),
    *("takeaway", "Summary", "summary", "think1", "think2", "think3", "think4", "think5", "think6"),
    *("Spawn", "Message", "Child", "Return", "Join"),
)
#: The tags of all formats of threads, one token each.
TAGS = tuple(tag for name in _NAMES for tag in (f"<{name}>", f"</{name}>"))
#: Pieces of text that are one token each; all other text is one token per character.
PHRASES = ("answer: ", "make ", " from ", "none", *TAGS)
_WORDS = Words(PHRASES, "0123456789+-*=()? :;,.")
#: Token ids by text.
VOCABULARY = _WORDS.ids
#: White space that is dropped: around line ends, around signs, and after the number of a thread.
_DROPPED = r" *\n+ *| +(?=[-+*=?])|(?<=[-+*=?]) +|(?<=[0-9]:) +"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of digits, signs, phrases and tags; other text becomes `<unk>`.

    >>> build_tokenizer().decode(build_tokenizer()("<Outline>1: 7</Outline>").input_ids)
    '<Outline>1:7</Outline>'
    """
    return _WORDS.tokenizer(normalizers.Replace(Regex(_DROPPED), ""))


def encode(text: str) -> list[int]:
    """Encodes a text of the language as the tokenizer does, but faster."""
    return _WORDS.encode(re.sub(_DROPPED, "", text))


def build_model(heads: int = 4, depth: int = 5) -> LlamaForCausalLM:
    """Makes a Llama of random weights; see `chat_llama`."""
    return chat_llama(len(VOCABULARY), heads, depth)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Saves a stock folder; see `save_folder`."""
    model.generation_config.max_new_tokens = CONTEXT // 2
    save_folder(model, build_tokenizer(), folder)
