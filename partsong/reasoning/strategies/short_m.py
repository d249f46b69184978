"""short-m@k: of many samples, the shortest vote."""

from __future__ import annotations

from partsong.errors import ArgumentError
from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.running_call import Partial
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll

__all__ = ["short_m"]


@checked
async def short_m(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: Count = 8,
    shortest: Count = 3,
    early_stop: bool = True,
    parameters: Parameters | None = None,
) -> Answer:
    """Asks `num` times at once and lets the `shortest` answers vote; the others are halted as soon as they are longer.

    Where all samples are written at the same speed, the shortest are the first to end, which is the paper's rule. Here
    tokens count and not the clock: a sample is halted when it has more tokens than each of `shortest` others needed in
    all, so neither a slow stream nor the run's concurrency changes the answer. A tie goes to the answer of the shortest
    sample. Samples that ran out of tokens or name no answer do not count.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in a text.
        num: k, samples begun.
        shortest: m, samples that vote.
        early_stop: whether to halt; without, all samples are written and the answer is the same.
        parameters: of the draws.

    Returns:
        The answer; ``details`` as of `self_consistency`, and ``lengths``, the tokens of those that voted.

    Raises:
        ArgumentError: a knob out of range, or `shortest` above `num`.

    Source: Don't Overthink It, arXiv 2505.17813.
    """
    if shortest > num:
        raise ArgumentError(f"shortest={shortest} of num={num} samples; let no more vote than there are")
    ended: list[tuple[int, int, Completion]] = []
    seen = 0

    def longer(partial: Partial) -> bool:
        # What it is shown and how long others were: those are complete, so a run that goes on halts the same samples
        # or lets them end, and either way they do not vote.
        return len(ended) >= shortest and partial.tokens > ended[shortest - 1][0]

    halt, chat = longer if early_stop else None, [Message("user", (question,))]
    async with run.samples(chat, num, path=("sample",), parameters=parameters, halt=halt) as samples:
        async for number, completion in samples:
            seen += 1
            if vote_of(completion, extract) is not None:
                ended.append((completion.usage.completion, number, completion))
                ended.sort(key=lambda made: made[:2])
    poll = Poll(min(shortest, len(ended)), extract)
    for place, (_, _, completion) in enumerate(ended[:shortest]):
        poll.count(place, completion)
    lengths = [tokens for tokens, _, _ in ended[:shortest]]
    return poll.answer(run, "done" if seen == num else "budget", lengths=lengths)
