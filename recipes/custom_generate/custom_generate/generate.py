"""Generates with guesses that are verified, from a repository: ``model.generate(..., custom_generate=REPOSITORY)``.

Copy the folder above this file into a repository of the hub. Texts are those of ``generate`` and come sooner where they
repeat themselves or their prompts. It needs the package partsong.
"""

from __future__ import annotations

from typing import Any

from transformers import StoppingCriteriaList, StopStringCriteria

from partsong import SpeculativeDecoder


def generate(model: Any, speculate: str = "ngram", seed: int = 0, **arguments: Any) -> Any:
    """Calls ``model.generate`` with a `SpeculativeDecoder`.

    Args:
        model: a causal language model of transformers.
        speculate: who guesses, such as "ngram:length=8" or "jacobi".
        seed: of the noise where texts are sampled.
        arguments: those of ``generate``.

    Returns:
        What ``generate`` returns.
    """
    strings, tokenizer = arguments.pop("stop_strings", None), arguments.pop("tokenizer", None)
    if strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings needs tokenizer=, the model's own")
        criteria = [*(arguments.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
    for name in ("assistant_model", "streamer"):
        if arguments.get(name) is not None:
            raise ValueError(f"{name} cannot be used with this custom_generate; leave it out")
    return model.generate(**arguments, custom_generate=SpeculativeDecoder(speculate=speculate, seed=seed))
