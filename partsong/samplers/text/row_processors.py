"""Applies transformers' logits processors and stopping criteria to single texts at different steps.

`generate` calls them for all rows of a batch at once, which all have the same length. Where guesses are verified, rows
are at different steps, and every guess is a text of its own. So only those can be used that look only at the row they
are given, and have no memory. They are called for all texts of one length together.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import generation
from transformers.generation import logits_process, stopping_criteria

from partsong.errors import UnsupportedError

__all__ = ["RowProcessors"]

_PROCESSORS = (
    *(logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper, logits_process.TopPLogitsWarper),
    *(logits_process.MinPLogitsWarper, logits_process.TypicalLogitsWarper, logits_process.EpsilonLogitsWarper),
    *(logits_process.EtaLogitsWarper, logits_process.RepetitionPenaltyLogitsProcessor),
    *(logits_process.NoRepeatNGramLogitsProcessor, logits_process.SequenceBiasLogitsProcessor),
    *(logits_process.NoBadWordsLogitsProcessor, logits_process.MinLengthLogitsProcessor),
    *(logits_process.MinNewTokensLengthLogitsProcessor, logits_process.ForcedBOSTokenLogitsProcessor),
    *(logits_process.ForcedEOSTokenLogitsProcessor, logits_process.InfNanRemoveLogitsProcessor),
    *(logits_process.ExponentialDecayLengthPenalty, logits_process.LogitNormalization),
    *(logits_process.SuppressTokensLogitsProcessor, logits_process.SuppressTokensAtBeginLogitsProcessor),
)
_CRITERIA = (
    *(stopping_criteria.MaxLengthCriteria, stopping_criteria.MaxTimeCriteria),
    *(stopping_criteria.EosTokenCriteria, stopping_criteria.StopStringCriteria),
)


class RowProcessors:
    """Calls logits processors and stopping criteria for single texts.

    Args:
        processors: those that `generate` prepared for the batch.
        criteria: likewise.
        row_wise: further types that look at nothing but the row they are given.

    Raises:
        UnsupportedError: one of them may look at other rows or remember earlier calls.
    """

    def __init__(
        self,
        processors: generation.LogitsProcessorList,
        criteria: generation.StoppingCriteriaList,
        row_wise: Collection[type] = (),
    ) -> None:
        _check("logits processor", processors, {*_PROCESSORS, *row_wise})
        _check("stopping criterion", criteria, {*_CRITERIA, *row_wise})
        self._processors, self._criteria = processors, criteria

    def scores(self, rows: Sequence[int], texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Changes the logits after some texts.

        Args:
            rows: the row of the batch that each text belongs to.
            texts: as `generate` would have them, with padding at the beginning.
            logits: `[texts, vocabulary]`.

        Returns:
            A tensor of the same shape.
        """
        if not self._processors:
            return logits
        scores = logits.clone()
        for length in {len(text) for text in texts}:
            group = [number for number, text in enumerate(texts) if len(text) == length]
            ids = torch.tensor([texts[number] for number in group], device=logits.device)
            part = scores[group]
            for processor in self._processors:
                part = _of_rows(processor, [rows[number] for number in group])(ids, part)
            scores[group] = part.to(scores.dtype)
        return scores

    def ends(self, text: Sequence[int], scores: Any = None) -> bool:
        """Says whether a text ends here."""
        ids = torch.tensor([text])
        return any(bool(criterion(ids, scores)) for criterion in self._criteria)


def _of_rows(processor: Any, rows: list[int]) -> Any:
    """Returns a processor for some rows of the batch: one of these keeps a number for each row."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = ignored[rows]
    return own


def _check(kind: str, asked: Sequence[Any], known: Collection[type]) -> None:
    odd = sorted({type(each).__name__ for each in asked if type(each) not in known})
    if odd:
        raise UnsupportedError(
            f"generate was asked for the {kind} {', '.join(odd)}, which may look at other rows or remember earlier "
            f"calls, so it has no form for a single guess; leave it out, or if it looks at nothing but the row it is "
            f"given, name its type in SpeculativeDecoder(row_wise=...)"
        )
