"""Single makes one call, which every other strategy is compared with."""

from __future__ import annotations

from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import answer_of, together

__all__ = ["single"]


@checked
async def single(run: Run, question: str, *, extract: Extract, parameters: Parameters | None = None) -> Answer:
    """Asks once: sample 0 of every method that draws samples of the plain question.

    Args:
        run: makes the call.
        question: the prompt.
        extract: finds the answer in a text.
        parameters: how the answer is drawn; a temperature of 0 is greedy decoding.

    Returns:
        The answer; None where the sample ran out of tokens.
    """
    chat = [Message("user", (question,))]
    (sample,) = await together([run.call(chat, path=("sample",), parameters=parameters)])
    return answer_of(run, sample, extract, "budget" if sample is None else "done")
