"""The `products` model: a tokenizer of digits, signs and tags, and a stock Llama. Importing this loads torch."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from partsong.zoo.folders import save_folder
from partsong.zoo.sums.model import CHAT_TEMPLATE

__all__ = ["CONTEXT", "EOS", "MODEL", "PAD", "USER", "VOCABULARY", "build_model", "build_tokenizer", "encode"]

SPECIAL = ("<pad>", "<unk>", "<user>", "<model>", "<eos>")
PAD, UNKNOWN, USER, MODEL, EOS = range(len(SPECIAL))
_NAMES = (
    *("Parallel", "Goal", "Outline", "Path", "Conclusion", "Outlines", "Thread", "guideline", "plan", "step"),
    *("takeaway", "Summary", "summary", "think1", "think2", "think3", "think4", "think5", "think6"),
    *("Spawn", "Message", "Child", "Return", "Join"),
)
#: Tags of all formats of threads: one token each.
TAGS = tuple(tag for name in _NAMES for tag in (f"<{name}>", f"</{name}>"))
#: Pieces of text that are one token each; everything else is one token per character.
PHRASES = ("answer: ", "make ", " from ", "none", *TAGS)
CHARACTERS = "0123456789+-*=()? :;,."
#: Token ids by text.
VOCABULARY: dict[str, int] = {text: index for index, text in enumerate((*SPECIAL, *PHRASES, *CHARACTERS))}
#: The most tokens of a chat.
CONTEXT = 1024
_HEAD_WIDTH = 32
_PIECE = "|".join(map(re.escape, PHRASES)) + "|[\\s\\S]"
#: White space that means nothing: around line ends, around signs, and behind the number of a thread.
_NOTHING = r" *\n+ *| +(?=[-+*=?])|(?<=[-+*=?]) +|(?<=[0-9]:) +"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Digits, signs, phrases and tags; what is not of the language becomes `<unk>`.

    >>> build_tokenizer().decode(build_tokenizer()("<Outline>1: 7</Outline>").input_ids)
    '<Outline>1:7</Outline>'
    """
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(Regex(_NOTHING), "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<user>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        extra_special_tokens=["<model>"],
        **names,
    )


def encode(text: str) -> list[int]:
    """The ids of a text of the language, as the tokenizer makes them, with less ado."""
    return [VOCABULARY.get(piece, UNKNOWN) for piece in re.findall(_PIECE, re.sub(_NOTHING, "", text))]


def build_model(heads: int = 4, depth: int = 5) -> LlamaForCausalLM:
    """A Llama of random weights.

    Args:
        heads: attention heads of 32 channels.
        depth: layers.
    """
    width = _HEAD_WIDTH * heads
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=USER,
        eos_token_id=EOS,
    )
    config.partsong_adapter = "causal"
    return LlamaForCausalLM(config)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Saves a stock folder; see `save_folder`."""
    model.generation_config.max_new_tokens = CONTEXT // 2
    save_folder(model, build_tokenizer(), folder)
