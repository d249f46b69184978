"""Text out of tokens, and stop strings across their borders, against plain search in the whole text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from partsong.reasoning.local.stops import AnswerText


class Pieces:
    """A tokenizer whose tokens are given byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], **options: Any) -> str:
        return b"".join(self.pieces[index] for index in ids).decode("utf-8", "replace")


def cut(data: bytes, draw: random.Random) -> list[bytes]:
    borders = sorted(draw.sample(range(1, len(data)), draw.randint(0, min(6, len(data) - 1))))
    return [data[a:b] for a, b in zip([0, *borders], [*borders, len(data)], strict=True)]


def test_the_text_ends_before_the_first_stop_string() -> None:
    for seed in range(400):
        check_one(random.Random(seed))


def check_one(draw: random.Random) -> None:
    whole = "".join(draw.choice("abä€") for _ in range(draw.randint(2, 16)))
    stops = ["".join(draw.choice("abä") for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(0, 2))]
    pieces = cut(whole.encode(), draw)
    text = AnswerText(Pieces(pieces), stops)
    told = ""
    for index in range(len(pieces)):
        told += text.push(index)
        if text.stopped:
            break
    places = [whole.find(stop) for stop in stops if stop in whole]
    expected = whole[: min(places)] if places else whole
    assert text.stopped == bool(places)
    assert text.final() == expected
    # What was told on the way is never taken back.
    assert expected.startswith(told)


@pytest.mark.parametrize(
    ("pieces", "how", "final"),
    [
        (["<think>", "a.", "b.", "</think>", "c", ".", "d"], {}, "<think>a.b.</think>c"),
        (["\n<th", "ink>a.", "</think>c."], {}, "\n<think>a.</think>c"),
        (["a.", "b</think>", "c.d"], {"opened": True}, "a.b</think>c"),
        (["<think>", "a.", "b."], {}, "<think>a.b."),
        (["<think>", "a.", "b."], {"in_thoughts": True}, "<think>a"),
        (["say <think>.", "</think>"], {}, "say <think>"),
        (["<", "."], {}, "<"),
    ],
)
def test_stop_strings_count_in_the_answer_alone(pieces: list[str], how: dict[str, bool], final: str) -> None:
    text, shown = AnswerText(Pieces([piece.encode() for piece in pieces]), ["."], **how), ""
    for index in range(len(pieces)):
        shown += text.push(index)
        if text.stopped:
            break
    assert text.final() == final and final.startswith(shown)
    assert text.stopped == (final != "".join(pieces))


def test_what_may_begin_a_stop_string_is_held_back_and_let_go() -> None:
    text = AnswerText(Pieces([b"a", b"x", b"y", b"b", b"x", b"y", b"z"]), ["xyz"])
    assert [text.push(index) for index in range(7)] == ["a", "", "", "xyb", "", "", ""]
    assert text.stopped and text.final() == "axyb"


def test_bytes_that_are_no_character_yet_are_held_back() -> None:
    text = AnswerText(Pieces(["€".encode()[:1], "€".encode()[1:2], "€".encode()[2:], b"!"]))
    assert [text.push(index) for index in range(4)] == ["", "", "€", "!"]


def test_without_tokens_there_is_no_text() -> None:
    assert AnswerText(Pieces([]), ["a"]).final() == ""
