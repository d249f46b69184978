"""Builds the `sums` model: a tokenizer of digits, signs and a few words, and a stock Llama. Loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, normalizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from partsong_zoo.chat_model import CONTEXT, EOS, MODEL, PAD, USER, Words, chat_llama
from partsong_zoo.folders import save_folder

__all__ = ["CONTEXT", "EOS", "MODEL", "PAD", "USER", "build_model", "build_tokenizer", "encode", "save_model"]

#: Pieces of text that are one token each; all other text is one token per character.
PHRASES = (": yes. answer: ", ": no. answer: ", ". answer: ", "make ", " from ", "none", "list:", "found: ", ", ")
#: All other tokens.
CHARACTERS = "0123456789+-*=()? \n"
#: The language.
WORDS = Words(PHRASES, CHARACTERS)
#: Token ids by text.
VOCABULARY = WORDS.ids


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of digits, signs and phrases, which reads upper case as lower; other text becomes `<unk>`.

    >>> build_tokenizer().decode(build_tokenizer()("make 64 from 3 7 25 6").input_ids)
    'make 64 from 3 7 25 6'
    """
    # A sum may be typed with spaces around signs; they are dropped.
    spaces = normalizers.Replace(Regex(r" +(?=[-+*=?])|(?<=[-+*=?]) +"), "")
    return WORDS.tokenizer(normalizers.Sequence([normalizers.Lowercase(), spaces]))


def encode(text: str) -> list[int]:
    """Encodes a text of the language as the tokenizer does, but faster."""
    return WORDS.encode(text)


def decode(ids: Sequence[int]) -> str:
    """Decodes ids up to the first `<eos>` or padding."""
    return WORDS.decode(ids)


def build_model(heads: int = 5, depth: int = 6, words: Words = WORDS) -> LlamaForCausalLM:
    """Makes a Llama of random weights for a language; see `chat_llama`."""
    return chat_llama(len(words.texts), heads, depth)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Saves a stock folder whose default is to sample; see `save_folder`."""
    model.generation_config.do_sample = True
    model.generation_config.max_new_tokens = 96
    save_folder(model, build_tokenizer(), folder)
