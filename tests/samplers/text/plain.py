"""Decoding written out plainly, one text at a time: what the loop must agree with.

Nothing here is shared with the library: full sequences, the model's own forward with its head, softmax in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.tiny_models.text import causal_model

VOCAB, MASK = 40, 39


def llama(seed: int = 0, **more: object) -> LlamaForCausalLM:
    """A tiny model whose guesses are neither certain nor even."""
    ends = dict.fromkeys(("eos_token_id", "pad_token_id"))
    return causal_model("llama", seed, **{**ends, "vocab_size": VOCAB, "initializer_range": 0.25, **more}).float()


def probabilities(model: PreTrainedModel, tokens: list[int], sees: Tensor, shifted: bool) -> Tensor:
    """Float64 `[L, V]`: what the model says of every position of one text; the mask token is never an answer."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), attention_mask=sees[None, None]).logits[0].double()
    logits[:, MASK] = -torch.inf
    if shifted:
        logits = torch.cat([logits[:1], logits[:-1]])
    return logits.softmax(-1)


def sees_all(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def sees_blocks(size: int, start: int = 0) -> Callable[[int], Tensor]:
    """Block-causal attention; the grid begins at `start`."""

    def sees(length: int) -> Tensor:
        block = (torch.arange(length) - start) // size
        return block[None, :] <= block[:, None]

    return sees


Accept = Callable[[Tensor, list[int]], list[int]]


def quota(count: int) -> Accept:
    """The surest few."""

    def accept(probs: Tensor, waiting: list[int]) -> list[int]:
        return sorted(waiting, key=lambda p: (-float(probs[p].max()), p))[:count]

    return accept


def threshold(least: float) -> Accept:
    """All that are sure, and always the surest."""

    def accept(probs: Tensor, waiting: list[int]) -> list[int]:
        sure = [p for p in waiting if float(probs[p].max()) >= least]
        return sure or quota(1)(probs, waiting)

    return accept


def entropy_bound(gamma: float) -> Accept:
    """By rising entropy, while the entropies before it sum to at most gamma."""

    def accept(probs: Tensor, waiting: list[int]) -> list[int]:
        entropy = {p: float(-(probs[p][probs[p] > 0] * probs[p][probs[p] > 0].log()).sum()) for p in waiting}
        taken, spent = [], 0.0
        for p in sorted(waiting, key=lambda p: (entropy[p], p)):
            if spent > gamma:
                break
            taken.append(p)
            spent += entropy[p]
        return taken

    return accept


def factor(bold: float) -> Accept:
    """The most positions n of which the n-th surest is at least 1 - bold / (n + 1) likely."""

    def accept(probs: Tensor, waiting: list[int]) -> list[int]:
        order = quota(len(waiting))(probs, waiting)
        fitting = [n for n in range(1, len(order) + 1) if float(probs[order[n - 1]].max()) >= 1 - bold / (n + 1)]
        return order[: max(fitting, default=1)]

    return accept


def fill(
    model: PreTrainedModel,
    prompt: list[int],
    answer: list[int | None],
    accept: Accept,
    *,
    block: int,
    sees: Callable[[int], Tensor] = sees_all,
    shifted: bool = False,
    visible: int | None = None,
    eos: int | None = None,
) -> tuple[list[int], int]:
    """Fills the open positions of an answer block by block, greedily; the tokens and the number of forwards.

    Args:
        model: a stock causal language model, run with a mask of its own.
        prompt: its tokens.
        answer: given tokens, and None where one is to be decided.
        accept: positions to take, of the probabilities and the open positions of the block.
        block: its length; the grid begins after the prompt.
        sees: attention of a text of some length.
        shifted: a token is read at the place before it.
        visible: None, or the length of blocks from the text's start on that later ones are hidden from.
        eos: ends the text at its first place.
    """
    tokens = [*prompt, *(MASK if token is None else token for token in answer)]
    start, forwards = len(prompt), 0
    while MASK in tokens:
        first = (tokens.index(MASK) - start) // block
        end = len(tokens)
        if visible is not None:
            end = min(end, (tokens.index(MASK) // visible + 1) * visible)
        waiting = [p for p in range(start, end) if tokens[p] == MASK and (p - start) // block == first]
        probs = probabilities(model, tokens[:end], sees(end), shifted)
        forwards += 1
        for p in accept(probs, waiting):
            tokens[p] = int(probs[p].argmax())
        if eos is not None and eos in tokens[start:]:
            tokens = tokens[: tokens.index(eos, start) + 1]
    return tokens[start:], forwards
