"""Fork and join writes one text that splits into threads where the model says so and continues after all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Message, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.text_tree import Fork, Part, flat_text
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import answer_in
from partsong.reasoning.strategies.prompts import Prompts, ask
from partsong.reasoning.strategies.thread_text import ThreadPlace, ThreadText
from partsong.reasoning.strategies.thread_writer import ThreadWriter, repeated_tokens
from partsong.reasoning.threads.formats import FORMATS, Format, FormatName
from partsong.reasoning.threads.render import fork_text

__all__ = ["ForkJoinPrompts", "fork_join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkJoinPrompts(Prompts):
    """Holds the prompts of `fork_join`: the question, with or without the format, and the same for a child."""

    plain: str = "{question}"
    taught: str = (
        "You can work on several parts of a problem at the same time. Where there are parts that do not need each "
        "other, write exactly in this pattern, with as many threads as there are parts:\n\n{example}\n\nThreads are "
        "written all at once, so none of them knows what another one finds. Behind the last one you know them all: put "
        "together what they found, go on with the problem, and end with the final answer. Where nothing can be done "
        "at the same time, leave the pattern out.\n\nProblem:\n{question}"
    )
    child: str = "{message}"
    taught_child: str = "{message}\n\nEnd with what you found, in short, between {opening} and {closing}."


_PROMPTS = ForkJoinPrompts()


@checked
async def fork_join(
    run: Run,
    question: str,
    *,
    extract: Extract,
    format: FormatName = "threadweaver",
    num: Count = 4,
    max_threads: Count = 8,
    max_forks: Count = 8,
    max_depth: Count = 2,
    thread_tokens: Count = 1024,
    teach: bool = True,
    prompts: ForkJoinPrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    """Writes a text; where it announces threads, writes them at the same time and continues after them.

    A thread reads the text up to where it begins, and no other thread; what follows reads all of them. `LocalEngine`
    computes nothing twice for that. Other engines get the text with the threads one after the other and read it again;
    ``details["tokens_repeated"]`` says what that cost.

    Wrong tags are never an error: threads that cannot be read stay one text, with a note.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the problem.
        extract: finds the answer in the whole text.
        format: name of the tags; see `partsong.reasoning.threads`. In "parathinker" the answer begins with threads; in
            the others the model announces them.
        num: number of threads per fork in "parallel-r1" and "parathinker", whose texts do not state one.
        max_threads: most threads of a fork whose text states a number; if it states more, the first ones are written.
        max_forks: how many calls of a text may announce threads; the rest is then written as one text.
        max_depth: how deep forks may be nested in "multiverse" and "apr"; with 1 threads do not fork.
        thread_tokens: most tokens a thread writes itself.
        teach: whether to explain the format, for a model that was not trained in it.
        prompts: its prompts.
        parameters: how texts are drawn; `max_tokens` limits the text outside of threads, all calls together.

    Returns:
        The answer; None where the text is not whole. ``details`` hold ``tree``, nested lists of texts, of
        pieces with the call that wrote them, and of forks; ``threads``, the number of threads of each fork in reading
        order; ``notes``, where the text departs from the format; ``tokens_repeated``, prompt tokens that were computed
        again, None where the budget ended; and ``estimated``, whether that number may be off by a few tokens of tags,
        because the engine does not report the tokens of its texts.

    Raises:
        ArgumentError: a knob is out of range, or the format is unknown.

    Source: ThreadWeaver, arXiv 2512.07843; Multiverse, arXiv 2506.09991; NPR, arXiv 2512.07461; Parallel-R1, arXiv
    2509.07980; ParaThinker, arXiv 2509.04475; APR, arXiv 2504.15466.
    """
    form, settings = FORMATS[format], parameters or Parameters()
    writer = ThreadWriter(
        run=run,
        form=form,
        parameters=settings,
        num=num,
        max_threads=max_threads,
        max_forks=max_forks,
        max_depth=max_depth,
        thread_tokens=thread_tokens,
        child_chat=_child_chat(form, teach, prompts),
    )
    template = prompts.taught if teach else prompts.plain
    chat = ask(template, question=question, example=_example(form))
    text = await writer.write(ThreadPlace(chat=tuple(chat)), settings.max_tokens)
    return _answer(run, text, form, extract)


def _child_chat(form: Format, teach: bool, prompts: ForkJoinPrompts) -> Callable[[Piece], Sequence[Message]]:
    """Returns a function that makes the chat of a separate thread from its message."""
    opening, closing = form.returned or ("", "")

    def chat(message: Piece) -> Sequence[Message]:
        template = prompts.taught_child if teach else prompts.child
        return ask(template, message=message, opening=opening, closing=closing)

    return chat


def _example(form: Format) -> str:
    """Returns an example of a fork as the format writes it."""
    parts = ("first", "second")
    goals = [f"what the {which} part is" for which in parts]
    results = [f"what the {which} part gives" for which in parts]
    threads = [] if form.apart else [f" the work on the {which} part, and what it gives" for which in parts]
    return fork_text(form, goals, threads, " what they give together", results if form.apart else ())


def _answer(run: Run, text: ThreadText, form: Format, extract: Extract) -> Answer:
    calls = text.all_calls
    known = all(call.tokens is not None and call.usage.reported for call in calls)
    return answer_in(
        run,
        flat_text(text.parts),
        [call.source for call in calls],
        extract,
        "budget" if text.finish == "budget" else "done",
        valid=text.finish == "stop",
        tree=_as_json(text.parts),
        threads=_widths(text.parts),
        notes=text.notes,
        tokens_repeated=repeated_tokens(text),
        # Where a tag without a plan announces threads, its text is encoded again.
        estimated=not known or (form.plan is None and bool(form.announce)),
    )


def _as_json(parts: Sequence[Part]) -> list[Any]:
    """Returns a tree as lists and dictionaries that JSON can hold."""
    items: list[Any] = []
    for part in parts:
        if isinstance(part, Fork):
            marks = {"marks": list(part.marks)} if part.marks else {}
            apart = {"apart": True} if part.apart else {}
            items.append({"fork": [_as_json(thread) for thread in part.threads], **marks, **apart})
        else:
            items.append({"text": part.text, "call": part.source} if isinstance(part, Piece) else part)
    return items


def _widths(parts: Sequence[Part]) -> list[int]:
    """Counts the threads of each fork, in reading order."""
    widths: list[int] = []
    for part in parts:
        if isinstance(part, Fork):
            widths += [len(part.threads), *(width for thread in part.threads for width in _widths(thread))]
    return widths
