"""A text that `fork_join` has written, as the tree of what was drawn: what a policy is trained on. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from partsong.reasoning.calls.answer import Answer
from partsong.reasoning.calls.call import Completion
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.text_tree import Fork, Part, Piece
from partsong.reasoning.threads.formats import Format

__all__ = ["drawn_parts", "forked"]


def drawn_parts(run: Run, answer: Answer, form: Format | None, end: int) -> tuple[Part, ...]:
    """The text with every token the model drew, and none that it did not.

    Engines leave out what stopped a call: the tag that announces threads, the one that ends a thread, the token that
    ends the answer. The model drew these too, and what they bring has to count for them.

    Args:
        run: made the answer.
        answer: of `fork_join`; of `single` where `form` is None.
        form: of the threads.
        end: id of the token that ends an answer.

    Returns:
        Parts; pieces are what was drawn, with their tokens where the engine told them.
    """
    made = {name: node.completion for name, node in run.graph.nodes.items() if node.completion is not None}
    if form is None:
        (name,) = answer.calls
        return (made[name].piece, *_ended(made[name], end))
    parts, last = _parts(answer.details["tree"], form, made, "", set())
    return (*parts, *_ended(last, end))


def forked(answer: Answer) -> bool:
    """Whether a text has forked, each time as its format wants it."""
    return bool(answer.details.get("threads")) and not answer.details.get("notes")


def _ended(last: Completion | None, end: int) -> tuple[Piece, ...]:
    return (Piece("", tokens=(end,)),) if last is not None and last.finish == "stop" else ()


def _parts(
    shown: Sequence[Any], form: Format, made: Mapping[str, Completion], closer: str, seen: set[str]
) -> tuple[tuple[Part, ...], Completion | None]:
    """Parts of a text or thread, and the call that wrote the last of it."""
    parts: list[Part] = []
    last: Completion | None = None
    for one in shown:
        if isinstance(one, str):
            # A tag behind a call that did not run out of tokens is what stopped it.
            drawn = last is not None and last.finish == "stop" and one in (form.announce, closer)
            parts.append(Piece(one, last.source) if drawn and last is not None else one)
            last = None
        elif "fork" in one:
            threads = [
                _parts(thread, form, made, form.closer(mark), seen)[0] for mark, thread in enumerate(one["fork"], 1)
            ]
            parts.append(Fork(tuple(threads), tuple(one.get("marks", ())), apart=one.get("apart", False)))
            last = None
        elif one["call"] in seen:
            # What a thread has returned stands here once more, in the words of the runtime.
            parts.append(one["text"])
        else:
            seen.add(one["call"])
            last = made.get(one["call"])
            whole = last is not None and last.text == one["text"]
            parts.append(Piece(one["text"], one["call"], last.tokens if whole and last is not None else None))
    return tuple(parts), last
