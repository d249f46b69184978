"""How the tokens of a text are spelled one by one."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from partsong.cli.text_pieces import Pieces


def test_parts_of_a_character_are_spelled_together() -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(letters))}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    ids: list[int | None] = list(made("aé語", add_special_tokens=False).input_ids)
    pieces = Pieces(made, None, None, "░")
    assert pieces(ids) == ["a", "é語", "", "", "", ""]
    assert pieces([ids[0], None, ids[0], *ids[1:3]]) == ["a", "░", "a", "é", ""]
