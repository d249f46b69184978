"""Builds models that answer directly or search, a stock Llama with words for digits, signs and cells. Loads torch."""

from __future__ import annotations

from pathlib import Path

from tokenizers import normalizers
from transformers import LlamaForCausalLM

from partsong_zoo.chat_model import Words, chat_llama
from partsong_zoo.folders import save_folder
from partsong_zoo.search.sudokus import GUESS, STUCK, UNDO, cell_words

__all__ = ["LANGUAGES", "build_model", "flops", "save_model"]

#: The language of each task.
LANGUAGES = {
    "countdown": Words((": yes. answer: ", "make ", " from ", ", "), f"0123456789+-*=() <{STUCK}"),
    "sudoku-4": Words(cell_words(4), f"1234{GUESS}{STUCK}{UNDO}"),
    "sudoku-6": Words(cell_words(6), f"123456{GUESS}{STUCK}{UNDO}"),
}


def build_model(task: str, heads: int, depth: int) -> LlamaForCausalLM:
    """Makes a Llama of random weights; see `chat_llama`."""
    return chat_llama(len(LANGUAGES[task].texts), heads, depth)


def save_model(task: str, model: LlamaForCausalLM, folder: Path) -> None:
    """Saves a stock folder; see `save_folder`."""
    save_folder(model, LANGUAGES[task].tokenizer(normalizers.Lowercase()), folder)


def flops(model: LlamaForCausalLM, read: int, written: int) -> int:
    """Counts what it takes to read a prompt and to write a text token by token, with a cache: additions and products.

    Args:
        model: the model.
        read: how many tokens the prompt has.
        written: how many tokens the text has; the last one is not read again.
    """
    config = model.config
    inside = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("model.layers"))
    head = config.vocab_size * config.hidden_size
    positions = read + written - 1
    # Token t attends to t + 1 tokens: two products with the width of each, in every layer.
    attended = positions * (positions + 1) // 2
    return 2 * positions * inside + 2 * written * head + 4 * config.num_hidden_layers * config.hidden_size * attended
