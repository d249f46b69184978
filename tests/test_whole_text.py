"""Half characters: joined where they follow each other, replaced where they are alone, wherever text enters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from partsong.cli import parse
from partsong.cli.arguments import read_arguments
from partsong.evals.reasoning.line_file import LineFile
from partsong.reasoning import Completion, Message
from partsong.serving.answers.chat_fields import read_fields
from partsong.whole_text import CleanedPieces, whole_json, whole_text

TABLE = [
    ("plain", "plain"),
    ("", ""),
    ("naïve 😀", "naïve 😀"),
    ("\ud83d\ude00", "😀"),
    ("\ud83d", "\ufffd"),
    ("\ude00", "\ufffd"),
    ("a\ud83db", "a\ufffdb"),
    ("\ude00\ud83d", "\ufffd\ufffd"),
    ("\ud83d\ud83d\ude00", "\ufffd😀"),
    ("caf\udce9", "caf\ufffd"),  # a byte that Python could not decode
    ("\ufeffa\0b", "\ufeffa\0b"),
]


@pytest.mark.parametrize(("text", "whole"), TABLE)
def test_it_is_whole_at_once_and_in_pieces(text: str, whole: str) -> None:
    assert whole_text(text) == whole
    pieces = CleanedPieces()
    assert "".join(map(pieces.push, text)) + pieces.end() == whole
    assert whole_json({text: [text, 1, None, {"a": text}]}) == {whole: [whole, 1, None, {"a": whole}]}


@pytest.mark.parametrize(("text", "whole"), TABLE)
def test_wherever_text_enters(text: str, whole: str, tmp_path: Path) -> None:
    assert Completion(text=text, reasoning=text).text == whole
    assert Completion(text="", reasoning=text).reasoning == whole
    assert Message("user", (text, "!")).text == whole + "!"
    assert read_fields(json.dumps({"prompt": text}).encode()) == {"prompt": whole}
    assert read_arguments([f"prompt_2=_{text}"]) == {"prompt_2": f"_{whole}"}
    file = tmp_path / "lines"
    file.write_text(json.dumps({}) + "\n" + json.dumps({"a": text}) + "\n")
    with LineFile(file, {}, "file of lines") as opened:
        assert opened.lines == [{"a": whole}]


def test_arguments_of_the_command_line_are_cleaned_and_names_of_files_are_not() -> None:
    options = parse(["think", "2 \ud83d", "--journal", "caf\udce9"])
    assert (options.question, options.journal) == ("2 \ufffd", "caf\udce9")
    options = parse(["image", "a \ud83d circle", "--negative-prompt", "\ude00"])
    assert (options.prompt, options.negative_prompt) == ("a \ufffd circle", "\ufffd")
    assert parse(["text", "x\ud83d", "--template", "\ud83d"]).template == "\ufffd"
    assert dataclasses.is_dataclass(parse(["env"]))
