"""Runs a language model on answers with some tokens hidden, and reads how likely it finds these tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.samplers.text.heads import barred, log_probs
from partsong.samplers.text.model import TextAdapter, TextModel

__all__ = ["LikelihoodRow", "read_rows", "segments"]


@dataclass(frozen=True, slots=True)
class LikelihoodRow:
    """Describes one row of a forward: its tokens, which positions are read, and to which sum they belong."""

    answer: int
    segment: int
    draw: int
    tokens: list[int]
    prompt: int
    length: int
    masked: tuple[int, ...]
    weight: float


def segments(model: TextModel, prompt: int, answer: int) -> list[tuple[int, int]]:
    """Returns where each segment begins and ends: the whole answer, or its part of each block."""
    adapter = model.adapter
    if adapter.attention != "block_causal":
        return [(prompt, prompt + answer)]
    assert adapter.block_size is not None
    origin = prompt if adapter.block_origin == "prompt" else 0
    first = prompt + adapter.block_size - (prompt - origin) % adapter.block_size
    edges = [prompt, *range(first, prompt + answer, adapter.block_size), prompt + answer]
    return list(itertools.pairwise(edges))


@torch.no_grad()
def read_rows(model: TextModel, jobs: Sequence[LikelihoodRow], batch_size: int) -> tuple[list[float], list[bool]]:
    """Returns for each job the weighted mean log-probability of its masked tokens, and whether they are likeliest."""
    values, best = [0.0] * len(jobs), [False] * len(jobs)
    # The mask token cannot be an answer, just as in decoding.
    masks = (model.mask_token_id,) if model.adapter.noise == "mask" and model.mask_token_id is not None else ()
    bias = barred(model.head, masks)
    order = sorted(range(len(jobs)), key=lambda index: -jobs[index].length)
    for low in range(0, len(order), batch_size):
        here = order[low : low + batch_size]
        hidden, tokens = _hidden(model, [jobs[index] for index in here])
        logprobs, argmax = log_probs(model.head, hidden, tokens, bias)
        counts = [len(jobs[index].masked) for index in here]
        parts = zip(here, logprobs.double().split(counts), (argmax == tokens).split(counts), strict=True)
        for index, part, hits in parts:
            values[index], best[index] = jobs[index].weight * float(part.mean()), bool(hits.all())
    return values, best


def _hidden(model: TextModel, jobs: Sequence[LikelihoodRow]) -> tuple[Tensor, Tensor]:
    """Returns the hidden states `[M, C]` that predict the masked tokens, and those tokens `[M]`."""
    adapter, device = model.adapter, model.device
    length = max(job.length for job in jobs)
    tokens = torch.zeros(len(jobs), length, dtype=torch.int64)
    for row, job in enumerate(jobs):
        tokens[row, : job.length] = torch.tensor(job.tokens[: job.length])
    targets = torch.cat([tokens[row, list(job.masked)] for row, job in enumerate(jobs)])
    if adapter.noise == "mask":
        assert model.mask_token_id is not None
        for row, job in enumerate(jobs):
            tokens[row, list(job.masked)] = model.mask_token_id
    places = torch.arange(length)
    inside = places < torch.tensor([job.length for job in jobs])[:, None]
    group = _groups(adapter, places, torch.tensor([job.prompt for job in jobs]))
    visible = (group[:, None, :] <= group[:, :, None]) & inside[:, None, :]
    visible |= torch.eye(length, dtype=torch.bool)  # padding sees itself, so that nothing is divided by zero
    positions = places.expand(len(jobs), -1)
    hidden = model.forward(tokens.to(device), positions.to(device), positions.to(device), visible.to(device), None)
    rows = torch.cat([torch.full((len(job.masked),), row) for row, job in enumerate(jobs)])
    at = torch.cat([torch.tensor(job.masked) for job in jobs]) - int(adapter.shifted)
    return hidden[rows.to(device), at.to(device)], targets.to(device)


def _groups(adapter: TextAdapter, places: Tensor, prompts: Tensor) -> Tensor:
    """Returns groups, int64 `[B, L]`: a token sees those of its own and of lower groups."""
    if adapter.attention == "full":
        return torch.zeros(len(prompts), len(places), dtype=torch.int64)
    if adapter.attention == "causal":
        return places.expand(len(prompts), -1)
    assert adapter.block_size is not None
    origin = prompts if adapter.block_origin == "prompt" else torch.zeros_like(prompts)
    return (places - origin[:, None]).div(adapter.block_size, rounding_mode="floor")
