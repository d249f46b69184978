"""Finds the question of a command: on the command line, in a file, or on standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from partsong.errors import ArgumentError

__all__ = ["read_question"]


def read_question(question: str | None, file: str | None) -> str:
    """Returns the question that was asked.

    Args:
        question: what stands on the command line; ``-`` is standard input, and so is None if that is no terminal.
        file: a file that holds the question, in UTF-8.

    Raises:
        ArgumentError: there is no question or more than one, or the text cannot be read.
    """
    if question is not None and file is not None:
        raise ArgumentError(f"a question and --file {file} are given; leave one of them out")
    if question is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ArgumentError(
            "no question is given; write it after the command, or give --file FILE or - for standard input"
        )
    if file is not None:
        question = _text(file)
    elif question in (None, "-"):
        question = _text(None)
    assert question is not None
    if not question.strip():
        raise ArgumentError("the question is empty")
    return question


def _text(file: str | None) -> str:
    """Reads a file, or standard input, without the line end that closes it."""
    name = file or "standard input"
    try:
        data = sys.stdin.buffer.read() if file is None else Path(file).read_bytes()
        return data.decode("utf-8-sig").rstrip("\r\n")
    except OSError as error:
        raise ArgumentError(f"cannot read {name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(f"cannot read {name}: byte {error.start} is not UTF-8; save it as UTF-8 text") from None
