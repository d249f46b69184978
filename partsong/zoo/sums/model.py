"""The `sums` model: a tokenizer of digits, signs and a few words, and a stock Llama. Importing this loads torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from partsong.zoo.folders import save_folder

__all__ = ["CONTEXT", "EOS", "MODEL", "PAD", "USER", "build_model", "build_tokenizer", "encode", "save_model"]

SPECIAL = ("<pad>", "<unk>", "<user>", "<model>", "<eos>")
PAD, UNKNOWN, USER, MODEL, EOS = range(len(SPECIAL))
#: Pieces of text that are one token each; everything else is one token per character.
PHRASES = (": yes. answer: ", ": no. answer: ", ". answer: ", "make ", " from ", "none", "list:", "found: ", ", ")
CHARACTERS = "0123456789+-*=()? \n"
#: Token ids by text.
VOCABULARY: dict[str, int] = {text: index for index, text in enumerate((*SPECIAL, *PHRASES, *CHARACTERS))}
#: The most tokens of a chat.
CONTEXT = 1024
_HEAD_WIDTH = 32
_PIECE = "|".join(map(re.escape, PHRASES)) + "|[\\s\\S]"
#: A chat: each question after <user>, each answer after <model> and before <eos>.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<user>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<model>' + message['content'] + '<eos>' }}"
    "{%- else -%}{{ raise_exception('this model knows no role but user and assistant') }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<model>' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Digits, signs and phrases, upper case read as lower; what is not of the language becomes `<unk>`.

    >>> build_tokenizer().decode(build_tokenizer()("make 64 from 3 7 25 6").input_ids)
    'make 64 from 3 7 25 6'
    """
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    # Spaces around signs mean nothing; a sum may be typed with them.
    spaces = normalizers.Replace(Regex(r" +(?=[-+*=?])|(?<=[-+*=?]) +"), "")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), spaces])
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
    return [VOCABULARY.get(piece, UNKNOWN) for piece in re.findall(_PIECE, text)]


def decode(ids: Sequence[int]) -> str:
    """The text of ids up to the first `<eos>` or padding."""
    texts, said = (*SPECIAL, *PHRASES, *CHARACTERS), []
    for index in ids:
        if index in (EOS, PAD):
            break
        said.append(texts[index])
    return "".join(said)


def build_model(heads: int = 5, depth: int = 6) -> LlamaForCausalLM:
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
    """Saves a stock folder that samples where nobody says how to draw; see `save_folder`."""
    model.generation_config.do_sample = True
    model.generation_config.max_new_tokens = 96
    save_folder(model, build_tokenizer(), folder)
