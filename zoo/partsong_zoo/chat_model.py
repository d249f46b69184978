"""Holds what the zoo's chat models share: ids, template, tokenizer and a stock Llama. Importing this loads torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["CONTEXT", "EOS", "MODEL", "PAD", "UNKNOWN", "USER", "Words", "chat_llama"]

SPECIAL = ("<pad>", "<unk>", "<user>", "<model>", "<eos>")
PAD, UNKNOWN, USER, MODEL, EOS = range(len(SPECIAL))
#: How many tokens a chat may have.
CONTEXT = 1024
_HEAD_WIDTH = 32
#: Writes a chat: each question after <user>, each answer after <model> and before <eos>.
_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ '<user>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '<model>' + message['content'] + '<eos>' }}"
    "{%- else -%}{{ raise_exception('this model knows no role but user and assistant') }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<model>' }}{%- endif -%}"
)


class Words:
    """Holds a vocabulary of special tokens, phrases of one token each, and characters.

    Args:
        phrases: phrases; of two that begin alike, the longer comes first.
        characters: all other tokens.

    Attributes:
        texts: the text of every token, by id.
        ids: the id of every token, by text.

    >>> words = Words(["make "], "0123456789")
    >>> words.encode("make 7"), words.tokenizer(normalizers.Lowercase())("Make 7").input_ids
    ([5, 13], [5, 13])
    """

    def __init__(self, phrases: Sequence[str], characters: str) -> None:
        self.texts = (*SPECIAL, *phrases, *characters)
        self.ids: Mapping[str, int] = {text: index for index, text in enumerate(self.texts)}
        self._piece = "|".join(map(re.escape, phrases)) + "|[\\s\\S]"

    def encode(self, text: str) -> list[int]:
        """Encodes a text that needs no normalising as the tokenizer does, but faster."""
        return [self.ids.get(piece, UNKNOWN) for piece in re.findall(self._piece, text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids up to the first `<eos>` or padding."""
        texts: list[str] = []
        for index in ids:
            if index in (EOS, PAD):
                break
            texts.append(self.texts[index])
        return "".join(texts)

    def tokenizer(self, normalizer: normalizers.Normalizer) -> PreTrainedTokenizerFast:
        """Makes a stock tokenizer with a chat template; what is not of the language becomes `<unk>`."""
        tokenizer = Tokenizer(models.WordLevel(dict(self.ids), unk_token="<unk>"))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(self._piece), "isolated")
        tokenizer.decoder = decoders.Fuse()
        names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<user>", "eos_token": "<eos>"}
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=CONTEXT,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            chat_template=_TEMPLATE,
            extra_special_tokens=["<model>"],
            **names,
        )


def chat_llama(vocabulary: int, heads: int, depth: int) -> LlamaForCausalLM:
    """Makes a Llama of random weights.

    Args:
        vocabulary: how many tokens there are.
        heads: how many attention heads of 32 channels there are.
        depth: how many layers there are.
    """
    width = _HEAD_WIDTH * heads
    config = LlamaConfig(
        vocab_size=vocabulary,
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
