"""Tiny random language models and tokenizers of a few words that several files build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast


def causal_model(family: str = "llama", seed: int = 0, **changed: Any) -> Any:
    """A language model of two layers in float64."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    if family not in ("gpt2", "gpt_neox"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    if family in ("mistral", "qwen2", "qwen3"):
        sizes["sliding_window"] = None
    if family == "smollm3":
        sizes["no_rope_layers"] = [1, 0]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | changed)).double().eval()


def word_tokenizer(words: Sequence[str], split: Any, unknown: str = "<unk>", **named: Any) -> PreTrainedTokenizerFast:
    """A tokenizer that finds words by `split` and knows some of them."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=unknown))
    inner.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=inner, **named)


def letter_tokenizer(words: Sequence[str], letter: Any = "") -> PreTrainedTokenizerFast:
    """Reads letter by letter, or what else stands for one, and writes them without spaces."""
    split = pre_tokenizers.Split(letter, "isolated")
    made = word_tokenizer(words, split, "<pad>", eos_token="<eos>", pad_token="<pad>")
    made.backend_tokenizer.decoder = decoders.Fuse()
    return made
