"""Measures how many tokens a `lists` model decides per forward, how many answers are valid, and how they are spread.

Importing this module loads torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from transformers import PreTrainedModel

from partsong.knobs import Count, Number, check_knobs, type_hints
from partsong.samplers.text.decode import decode
from partsong.samplers.text.loading import load_text_model
from partsong_zoo.lists.model import BOS, CANVAS, answer_text, token_ids
from partsong_zoo.lists.tasks import ListExample, check, support

__all__ = ["decoded_texts", "measure_speed", "measure_spread"]


def decoded_texts(
    model: PreTrainedModel, prompts: Sequence[str], rule: str, *, temperature: float = 0.0, seed: int = 0
) -> tuple[list[str], dict[str, Any]]:
    """Decodes prompts together, with a canvas of 24 in one block and no cache.

    Returns:
        The answers, and what they cost: ``tokens``, ``forwards`` and ``tokens_per_forward``. Tokens are those of the
        answer and its end.
    """
    decoded = decode(
        load_text_model(model),
        [[BOS, *token_ids(prompt)] for prompt in prompts],
        rule=rule,
        max_new_tokens=CANVAS,
        block_size=CANVAS,
        temperature=temperature,
        seed=seed,
    )
    tokens = sum(map(len, decoded.tokens))
    forwards = sum(tally.num_forwards for tally in decoded.tallies)
    cost = {"tokens": tokens, "forwards": forwards, "tokens_per_forward": tokens / forwards}
    return [answer_text(text) for text in decoded.tokens], cost


def measure_speed(
    model: PreTrainedModel, examples: Sequence[ListExample], rule: str, *, temperature: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """Decodes the prompts of some examples and checks the answers.

    Returns:
        A flat row: ``num accuracy tokens forwards tokens_per_forward``; the accuracy is a fraction.
    """
    prompts = [example.prompt for example in examples]
    texts, cost = decoded_texts(model, prompts, rule, temperature=temperature, seed=seed)
    return {"num": len(texts), "accuracy": sum(map(check, prompts, texts)) / len(texts), **cost}


def measure_spread(
    model: PreTrainedModel,
    prompt: str,
    rule: str,
    *,
    num: Count = 200,
    temperature: Annotated[float, Number(0.0, above=True)] = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Draws many answers to one prompt and compares them with all valid ones, which are equally likely.

    A model that has collapsed gives few distinct answers, however many are valid.

    Args:
        model: a `lists` model that fills masks.
        prompt: what is asked.
        rule: as `decode` reads it.
        num: answers drawn.
        temperature: of the draws.
        seed: draws them.

    Returns:
        A flat row: ``prompt draws answers valid distinct expected_distinct total_variation floor tokens_per_forward``.
        ``answers`` counts the valid ones there are, ``distinct`` those that came, ``expected_distinct`` those that
        would come in the mean from even draws, and ``floor`` is the total variation that even draws measure.

    Raises:
        ArgumentError: a knob is out of bounds, or the prompt is not of the language.
    """
    check_knobs(type_hints(measure_spread), {"num": num, "temperature": temperature})
    truth = support(prompt)
    texts, cost = decoded_texts(model, [prompt] * num, rule, temperature=temperature, seed=seed)
    seen = Counter(texts)
    counts = [seen.pop(text, 0) for text in truth]
    invalid = sum(seen.values())
    apart = sum(abs(count / num - 1 / len(truth)) for count in counts)
    return {
        "prompt": prompt,
        "draws": num,
        "answers": len(truth),
        "valid": 1 - invalid / num,
        "distinct": sum(count > 0 for count in counts),
        "expected_distinct": len(truth) * (1 - (1 - 1 / len(truth)) ** num),
        "total_variation": 0.5 * (apart + invalid / num),
        "floor": _even_distance(len(truth), num),
        "tokens_per_forward": cost["tokens_per_forward"],
    }


def _even_distance(answers: int, num: int) -> float:
    """Returns the mean total variation from the even distribution that even draws measure, over binomial counts."""
    share, mean = 1 / answers, num / answers
    if answers == 1:
        return 0.0
    log_odds = (math.log(share), math.log1p(-share))
    total = 0.0
    for count in range(num + 1):
        ways = math.lgamma(num + 1) - math.lgamma(count + 1) - math.lgamma(num - count + 1)
        total += math.exp(ways + count * log_odds[0] + (num - count) * log_odds[1]) * abs(count - mean)
    return 0.5 * answers * total / num
