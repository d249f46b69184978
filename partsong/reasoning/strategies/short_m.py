"""short-m@k draws many samples and lets the shortest vote."""

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
    tokens count and not the clock: a sample is halted when it has more tokens than each of `shortest` others needed to
    end. So neither a slow stream nor the run's concurrency changes the answer. A tie goes to the answer of the shortest
    sample. Samples that ran out of tokens or name no answer do not count.

    Args:
        run: makes the calls.
        question: the prompt.
        extract: finds the answer in a text.
        num: k, the samples begun.
        shortest: m, the samples that vote.
        early_stop: whether to halt samples. Without it all are written, and the answer is the same.
        parameters: how samples are drawn.

    Returns:
        The answer. ``details`` hold what those of `self_consistency` hold, and ``lengths``, the tokens of the samples
        that voted.

    Raises:
        ArgumentError: a knob is out of range, or `shortest` is larger than `num`.

    Source: Don't Overthink It, arXiv 2505.17813.
    """
    if shortest > num:
        raise ArgumentError(f"shortest={shortest} of num={num} samples; let no more vote than there are")
    ended: list[tuple[int, int, Completion]] = []
    unnamed: list[tuple[int, int, Completion]] = []
    seen = 0

    def is_longer(partial: Partial) -> bool:
        # It looks only at complete samples. So a run that is resumed either halts the same samples or lets them end,
        # and in both cases they do not vote.
        return len(ended) >= shortest and partial.tokens > ended[shortest - 1][0]

    halt, chat = is_longer if early_stop else None, [Message("user", (question,))]
    async with run.samples(chat, num, path=("sample",), parameters=parameters, halt=halt) as samples:
        async for number, completion in samples:
            seen += 1
            sample = (completion.usage.completion, number, completion)
            if vote_of(completion, extract) is None:
                unnamed.append(sample)
            else:
                ended.append(sample)
                ended.sort(key=lambda sample: sample[:2])
    ended = ended or sorted(unnamed, key=lambda sample: sample[:2])  # no votes, but texts to show
    poll = Poll(min(shortest, len(ended)), extract)
    for place, (_, _, completion) in enumerate(ended[:shortest]):
        poll.count(place, completion)
    lengths = [tokens for tokens, _, _ in ended[:shortest]]
    return poll.answer(run, "done" if seen == num else "budget", lengths=lengths)
