"""Turns a text of `fork_join` into the tree of its draws, on which a policy is trained. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partsong.reasoning.calls.answer import Answer
from partsong.reasoning.calls.call import Completion
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.text_tree import Fork, Part, Piece
from partsong.reasoning.threads.formats import Format

__all__ = ["drawn_parts", "has_forked"]


def drawn_parts(run: Run, answer: Answer, form: Format | None, end: int) -> tuple[Part, ...]:
    """Returns the parts of a text, with exactly the tokens that the model drew as pieces.

    Engines leave out what stopped a call: the tag that announces threads, the one that ends a thread, and the token
    that ends the answer. The model drew these, too, so they must be learned.

    Args:
        run: the run that made the answer.
        answer: the result of `fork_join`, or of `single` if `form` is None.
        form: the format of the threads.
        end: id of the token that ends an answer.

    Returns:
        The parts. Pieces are what was drawn, with their tokens if the engine reported them.
    """
    written = {name: node.completion for name, node in run.graph.nodes.items() if node.completion is not None}
    if form is None:
        (name,) = answer.calls
        return (written[name].piece, *_end_piece(written[name], end))
    parts, last = _parts(answer.details["tree"], form, written, "", set())
    return (*parts, *_end_piece(last, end))


def has_forked(answer: Answer) -> bool:
    """Returns whether a text has forked, each time as its format wants it."""
    return bool(answer.details.get("threads")) and not answer.details.get("notes")


def _end_piece(last: Completion | None, end: int) -> tuple[Piece, ...]:
    return (Piece("", tokens=(end,)),) if last is not None and last.finish == "stop" else ()


def _parts(
    shown: Sequence[Any], form: Format, written: Mapping[str, Completion], closer: str, seen: set[str]
) -> tuple[tuple[Part, ...], Completion | None]:
    """Lists the parts of a text or thread, and finds the call that wrote the last of them."""
    parts: list[Part] = []
    last: Completion | None = None
    for one in shown:
        if isinstance(one, str):
            # A tag after a call that did not run out of tokens is what stopped it.
            drawn = last is not None and last.finish == "stop" and one in (form.announce, closer)
            parts.append(Piece(one, last.source) if drawn and last is not None else one)
            last = None
        elif "fork" in one:
            threads = [
                _parts(thread, form, written, form.closer(mark), seen)[0] for mark, thread in enumerate(one["fork"], 1)
            ]
            parts.append(Fork(tuple(threads), tuple(one.get("marks", ())), apart=one.get("apart", False)))
            last = None
        elif one["call"] in seen:
            # A thread's result is repeated here, inserted by the runtime.
            parts.append(one["text"])
        else:
            seen.add(one["call"])
            last = written.get(one["call"])
            whole = last is not None and last.text == one["text"]
            parts.append(Piece(one["text"], one["call"], last.tokens if whole and last is not None else None))
    return tuple(parts), last
