"""Where prompts come from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partsong import ArgumentError, zoo
from partsong.evals.pictures.prompts import read_prompts


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a lighthouse\n\n  two cats \r\n", encoding="utf-8")
    assert read_prompts([str(path)]) == ["a lighthouse", "two cats"]


def test_json_lines_have_a_field_prompt_and_others_that_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "evaluation_metadata.jsonl"
    rows = [{"tag": "counting", "include": [{"class": "cat", "count": 2}], "prompt": f"{n} cats"} for n in (2, 3)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_prompts([str(path)]) == ["2 cats", "3 cats"]


def test_a_folder_has_a_prompt_in_each_text_file(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second,\nover two lines\n"), ("a.txt", "first"), ("readme.md", "no prompt")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_prompts([str(tmp_path)]) == ["first", "second,\nover two lines"]


def test_a_zoo_model_has_captions_of_its_own() -> None:
    captions = zoo.shapes.captions(4, 7)
    assert read_prompts([], 4, model="shapes", seed=7) == captions == read_prompts(["shapes"], 4, model="x", seed=7)
    assert len(read_prompts([], model="shapes")) == 20


def test_sources_follow_each_other_and_prompts_are_used_again_in_turn(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n", encoding="utf-8")
    sources = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert read_prompts(sources) == ["a1", "a2", "b1", "b2"]
    assert read_prompts(sources, 3) == ["a1", "a2", "b1"]
    assert read_prompts(sources, 6) == ["a1", "a2", "b1", "b2", "a1", "a2"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}', "line 2 is no object with a text in its field prompt"),
        ("p.jsonl", '{"prompt": 3}', "line 1 is no object"),
        ("p.jsonl", "a plain line", "line 1 is not JSON"),
        ("p.txt", " \n\n", "holds no prompt: no line with a text"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=words):
        read_prompts([str(tmp_path / name)])


def test_missing_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match="no such file or folder, and no zoo model with captions; did you mean shap"
    ):
        read_prompts(["shape"])
    with pytest.raises(ArgumentError, match=r"holds no prompt: no \.txt file"):
        read_prompts([str(tmp_path)])
    with pytest.raises(ArgumentError, match=r"has no captions of its own; give --prompts"):
        read_prompts([], model="black-forest-labs/FLUX.1-dev")
