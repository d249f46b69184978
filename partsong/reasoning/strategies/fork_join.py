"""Fork and join: one text that parts into threads where the model says so, and goes on behind all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Message, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.text_tree import Fork, Part, flat_text
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import concluded
from partsong.reasoning.strategies.prompts import Prompts, ask
from partsong.reasoning.strategies.thread_writer import ThreadPlace, ThreadWriter, Written, repeated_tokens
from partsong.reasoning.threads.formats import FORMATS, Format, FormatName
from partsong.reasoning.threads.render import fork_text

__all__ = ["ForkJoinPrompts", "fork_join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkJoinPrompts(Prompts):
    """What `fork_join` says: the question by itself, and with the format explained; likewise what a child is told."""

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
    """Writes a text; where it announces threads, writes these at the same time, and goes on behind them.

    A thread reads the text up to where it begins, and no other thread; what follows reads all of them. `LocalEngine`
    computes nothing twice for that. Other engines are given the text with the threads one behind the other and read it
    again; ``details["tokens_repeated"]`` says what that cost.

    What a model makes of the tags never fails: threads that cannot be read stay one text, with a note.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the problem.
        extract: finds the answer in the whole text.
        format: the tags; see `partsong.reasoning.threads`. In "parathinker" threads begin with the answer; in the
            others the model announces them.
        num: threads of a fork in "parallel-r1" and "parathinker", whose texts do not say.
        max_threads: of a fork whose text says; of more, the first ones are written.
        max_forks: calls of a text that may announce threads; what follows is one text.
        max_depth: forks within forks in "multiverse" and "apr"; 1 is none.
        thread_tokens: most tokens a thread writes itself.
        teach: whether to explain the format, for a model that was not trained in it.
        prompts: texts of its own.
        parameters: of the draws; `max_tokens` is what the text outside of threads may have, all calls together.

    Returns:
        The answer; none where the text is not whole. ``details``: ``tree``, lists of texts, pieces with their call, and
        forks; ``threads``, of each fork, in the order of reading; ``notes``, what went otherwise than the format wants
        it; ``tokens_repeated``, prompt tokens that were computed again, None where the budget ended; ``estimated``,
        whether that is off by some tokens of tags, for the engine does not tell which tokens its texts have.

    Raises:
        ArgumentError: a knob out of range, or an unknown format.

    Source: ThreadWeaver, arXiv 2512.07843; Multiverse, arXiv 2506.09991; NPR, arXiv 2512.07461; Parallel-R1, arXiv
    2509.07980; ParaThinker, arXiv 2509.04475; APR, arXiv 2504.15466.
    """
    form, asked = FORMATS[format], parameters or Parameters()
    writer = ThreadWriter(
        run=run,
        form=form,
        parameters=asked,
        num=num,
        max_threads=max_threads,
        max_forks=max_forks,
        max_depth=max_depth,
        thread_tokens=thread_tokens,
        child=_child(form, teach, prompts),
    )
    template = prompts.taught if teach else prompts.plain
    chat = ask(template, question=question, example=_example(form))
    text = await writer.write(ThreadPlace(chat=tuple(chat)), asked.max_tokens)
    return _answer(run, text, form, extract)


def _child(form: Format, teach: bool, prompts: ForkJoinPrompts) -> Any:
    """What a thread that stands apart is asked."""
    opening, closing = form.returned or ("", "")

    def chat(message: Piece) -> Sequence[Message]:
        template = prompts.taught_child if teach else prompts.child
        return ask(template, message=message, opening=opening, closing=closing)

    return chat


def _example(form: Format) -> str:
    """A fork as the format writes it, to show."""
    parts = ("first", "second")
    goals = [f"what the {which} part is" for which in parts]
    found = [f"what the {which} part gives" for which in parts]
    works = [] if form.apart else [f" the work on the {which} part, and what it gives" for which in parts]
    return fork_text(form, goals, works, " what they give together", found if form.apart else ())


def _answer(run: Run, text: Written, form: Format, extract: Extract) -> Answer:
    calls = text.all_calls
    known = all(call.tokens is not None and call.usage.reported for call in calls)
    return concluded(
        run,
        flat_text(text.parts),
        [call.source for call in calls],
        extract,
        "budget" if text.finish == "budget" else "done",
        valid=text.finish == "stop",
        tree=_shown(text.parts),
        threads=list(_widths(text.parts)),
        notes=text.notes,
        tokens_repeated=repeated_tokens(text),
        # Where a tag without a plan announced threads, its text is encoded anew.
        estimated=not known or (form.plan is None and bool(form.announce)),
    )


def _shown(parts: Sequence[Part]) -> list[Any]:
    """A tree as JSON has it."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, Fork):
            fork = {"fork": [_shown(thread) for thread in part.threads]}
            found.append(
                fork | ({"marks": list(part.marks)} if part.marks else {}) | ({"apart": True} if part.apart else {})
            )
        else:
            found.append({"text": part.text, "call": part.source} if isinstance(part, Piece) else part)
    return found


def _widths(parts: Sequence[Part]) -> list[int]:
    """Threads of each fork."""
    found: list[int] = []
    for part in parts:
        if isinstance(part, Fork):
            found += [len(part.threads), *(width for thread in part.threads for width in _widths(thread))]
    return found
