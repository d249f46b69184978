"""Builds the `lists` models: a word-level tokenizer and two stock Llama modules. Importing this module loads torch."""

from __future__ import annotations

from typing import Literal

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from partsong_zoo.lists.requests import WORDS

SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>", "<mask>")
#: Token ids by word.
VOCABULARY: dict[str, int] = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
PAD, UNKNOWN, BOS, EOS, MASK = range(len(SPECIAL))
#: How many masks may follow a prompt.
CANVAS = 24
#: How many tokens a prompt may have, including the first one.
PROMPT = 16
_HEAD_WIDTH = 32


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per word of the language and `<bos>` in front; unknown words become `<unk>`.

    >>> build_tokenizer()("copy : ant =").input_ids[0] == BOS
    True
    """
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "bos", "eos", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=PROMPT + CANVAS, **names)


def build_model(kind: Literal["mdlm", "ar"], heads: int = 4, depth: int = 6) -> LlamaForCausalLM:
    """Makes a Llama of random weights.

    Args:
        kind: "mdlm", a masked diffusion model, or "ar", its causal twin.
        heads: Attention heads of 32 channels.
        depth: Layers.

    Returns:
        A stock module. The kinds differ only in the configuration: its `partsong_adapter` names the row by which the
        text decoder knows it ("mdlm", in which all tokens see each other, or "causal"), and an "mdlm" also has a
        `mask_token_id`.
    """
    width = _HEAD_WIDTH * heads
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        max_position_embeddings=PROMPT + CANVAS,
        # Few positions: a small base tells neighbours apart in most channels.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        use_cache=kind == "ar",
    )
    # Code that does not read these takes a Llama for a causal model.
    config.partsong_adapter = "mdlm" if kind == "mdlm" else "causal"
    config.partsong_canvas = CANVAS
    if kind == "mdlm":
        config.mask_token_id = MASK
    return LlamaForCausalLM(config)


def full_mask(valid: Tensor) -> Tensor:
    """Makes the additive mask `[batch, 1, length, length]`, float, by which every token sees every valid one.

    A stock Llama takes a mask of four dimensions as it is, instead of making a causal one.

    Args:
        valid: Which tokens are not padding, bool `[batch, length]`.
    """
    bias = torch.zeros(valid.shape, device=valid.device).masked_fill(~valid, torch.finfo(torch.float32).min)
    return bias[:, None, None, :].expand(-1, 1, valid.shape[1], -1)


def token_ids(text: str) -> list[int]:
    """Encodes a text's words, with nothing in front; unknown words become `<unk>`."""
    return [VOCABULARY.get(word, UNKNOWN) for word in text.split()]


def answer_text(ids: list[int]) -> str:
    """Returns the words before the first `<eos>`."""
    words = (*SPECIAL, *WORDS)
    return " ".join(words[index] for index in (ids[: ids.index(EOS)] if EOS in ids else ids))
