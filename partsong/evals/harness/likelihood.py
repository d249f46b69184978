"""Computes how likely a language model finds an answer, exactly for causal models and as a bound for masked ones.

A masked diffusion model knows the probability of any tokens given any others, but not that of a text. The text can be
written in many orders, and the mean of the log-probability over all orders is a lower bound. Let t(S) be the mean
log-probability of the tokens S given the others. The bound of K tokens is the sum over k = 1 ... K of the mean of t
over all S of size k. For a model whose conditionals agree with each other it is the log-likelihood itself.

The estimate of this sum has less noise than with independent masks. The one S of size K is computed instead of drawn.
Every S comes with its complement, so that each pair predicts every token exactly once. The sizes are spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from partsong import seeds
from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.likelihood_masks import Draw, mask_draws, variance_of
from partsong.evals.harness.likelihood_rows import LikelihoodRow, read_rows, segments
from partsong.knobs import Count, check_knobs, type_hints
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.model import TextModel
from partsong.samplers.text.request import row_seeds

__all__ = ["Likelihood", "log_likelihood"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Likelihood:
    """Holds the log-likelihood of one answer.

    Attributes:
        log_likelihood: in nats; an estimate of the bound, or the exact number.
        standard_error: of that estimate, in nats; 0.0 if nothing was drawn, nan if one draw is too few to know.
        kind: "exact" for the model's own log-likelihood, "bound" for a lower bound.
        forwards: of one row each.
        greedy: whether taking the most likely token each time writes this answer; None if that depends on the order.
    """

    log_likelihood: float
    standard_error: float
    kind: Literal["exact", "bound"]
    forwards: int
    greedy: bool | None = None


def log_likelihood(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    adapter: Any = None,
    num_pairs: Count = 16,
    masks: Literal["pairs", "independent"] = "pairs",
    seed: int | Sequence[int] = 0,
    batch_size: Count = 16,
) -> list[Likelihood]:
    """Computes log-likelihoods of answers given prompts.

    A causal model takes one forward per answer. A block diffusion model takes its blocks one after another, each given
    those before it. If an answer has fewer masks than would be drawn, all of them are computed and there is no error.

    Args:
        model: as `decode` takes it, unless its noise is uniform.
        prompts: token ids of each row; may be empty unless the model predicts a token from the place before it.
        answers: token ids of each row, at least one.
        adapter: as in `decode`.
        num_pairs: how many pairs of complementary masks to draw per answer or per block of it; they take
            ``2 num_pairs + 1`` forwards.
        masks: "pairs", as described above, or "independent" for as many masks drawn one by one, with only their
            sizes spread evenly; this is LLaDA's own estimator and has more noise.
        seed: the masks of a row depend on the seed and its number. A list gives each row a seed of its own.
        batch_size: rows of a forward.

    Returns:
        A `Likelihood` for each answer, in order.

    Raises:
        ArgumentError: rows, tokens or numbers do not fit.
        UnsupportedError: the noise of the model is uniform.

    Source: any-order bound, Hoogeboom et al., arXiv 2110.02037; LLaDA, arXiv 2502.09992.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    >>> llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> log_likelihood(llama, [[1, 2]], [[3, 4, 5]])[0].kind
    'exact'
    """
    model, prompts, answers = _checked(model, adapter, prompts, answers)
    check_knobs(type_hints(log_likelihood), {"num_pairs": num_pairs, "batch_size": batch_size, "masks": masks})
    exact, jobs = model.adapter.noise == "none", []
    for row, row_seed in enumerate(row_seeds(seed, len(prompts), "answers")):
        prompt, answer = prompts[row], answers[row]
        for number, (start, end) in enumerate(segments(model, len(prompt), len(answer))):
            draws: list[list[Draw]] = [[(tuple(range(end - start)), float(end - start))]]
            if not exact:
                draws = mask_draws(end - start, num_pairs, masks, seeds.derive(row_seed, "masks", number))
            jobs += [
                LikelihoodRow(
                    row, number, draw, [*prompt, *answer], len(prompt), end, tuple(start + p for p in places), weight
                )
                for draw, group in enumerate(draws)
                for places, weight in group
            ]
    values, best = read_rows(model, jobs, batch_size)
    return [
        Likelihood(
            log_likelihood=total,
            standard_error=math.sqrt(variance),
            kind="exact" if exact else "bound",
            forwards=sum(job.answer == row for job in jobs),
            greedy=best[row] if exact else None,
        )
        for row, (total, variance) in enumerate(_sums(jobs, values, len(answers)))
    ]


def _sums(jobs: Sequence[LikelihoodRow], values: Sequence[float], answers: int) -> list[tuple[float, float]]:
    """Adds up the values of each answer, and returns the sums with their variances."""
    totals = [0.0] * answers
    groups: list[dict[int, dict[int, float]]] = [{} for _ in range(answers)]
    for job, value in zip(jobs, values, strict=True):
        totals[job.answer] += value
        draws = groups[job.answer].setdefault(job.segment, {})
        draws[job.draw] = draws.get(job.draw, 0.0) + value
    return [
        (
            total,
            sum(variance_of([value for draw, value in sorted(draws.items()) if draw > 0]) for draws in mine.values()),
        )
        for total, mine in zip(totals, groups, strict=True)
    ]


def _checked(
    model: Any, adapter: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[TextModel, list[list[int]], list[list[int]]]:
    if adapter is not None or not hasattr(model, "key_store"):
        model = load_text_model(model, adapter=adapter)
    if model.adapter.noise == "uniform":
        raise UnsupportedError(
            f"models of the family {model.adapter.name!r} start from random tokens, for which no bound is implemented"
        )
    asked, answered = _rows("prompt", prompts, model), _rows("answer", answers, model)
    if len(asked) != len(answered):
        raise ArgumentError(f"{len(asked)} prompts and {len(answered)} answers; give one answer for each")
    most = model.max_positions
    for row, (prompt, answer) in enumerate(zip(asked, answered, strict=True)):
        if not answer:
            raise ArgumentError(f"answer {row} is empty; give at least one token")
        if model.adapter.noise == "mask" and model.mask_token_id in answer:
            raise ArgumentError(f"answer {row} has the mask token {model.mask_token_id}, which the model never writes")
        if model.adapter.shifted and not prompt:
            raise ArgumentError(f"prompt {row} is empty, but this model reads a token at the place before it; give one")
        if most is not None and len(prompt) + len(answer) > most:
            raise ArgumentError(f"row {row} has {len(prompt) + len(answer)} tokens, the model has {most} positions")
    return model, asked, answered


def _rows(name: str, rows: Sequence[Sequence[int]], model: TextModel) -> list[list[int]]:
    token_rows = [list(map(int, row)) for row in rows]
    for number, row in enumerate(token_rows):
        wrong = [token for token in row if not 0 <= token < model.vocab_size]
        if wrong:
            raise ArgumentError(f"{name} {number} has token {wrong[0]}, but the model has {model.vocab_size} tokens")
    return token_rows
