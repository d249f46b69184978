"""Help: an example that can be asked for, whole sentences, common options last, and no defaults that say nothing."""

from __future__ import annotations

import re
import shlex

import pytest

from partsong.cli import main, parse
from partsong.cli.commands import COMMANDS
from partsong.cli.help_texts import EXAMPLES

SUITES = ("oracle", "parallelbench", "reasoning", "images", "videos", "promises", "planner")


def shown(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*(name for name in COMMANDS if name != "eval"), *(f"eval {s}" for s in SUITES)])
def test_a_command_has_an_example_and_whole_sentences(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(capsys, *command.split())
    assert f"Example: partsong {command}" in text
    assert "(default: None)" not in text and "(default: False)" not in text
    options = re.findall(r"^[│ ] (-[-a-z]+)", text, flags=re.MULTILINE)
    assert options[0] == "-h" and options[-2:] == ["--json", "--debug"]


@pytest.mark.parametrize("command", ["", "eval"])
def test_a_list_of_commands_has_no_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *command.split())
    assert "Example" not in text and all(name in text for name in (SUITES if command else COMMANDS))


def test_sentences_go_on_where_a_line_of_the_source_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    lines = shown(capsys, "plan").splitlines()
    assert any("this machine as `partsong calibrate` has measured it." in line for line in lines)
    assert any("device, as a root mean square" in line and "(default: 0.0)" in line for line in lines)


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_examples_can_be_asked_for(example: str) -> None:
    parse(shlex.split(example)[1:])
