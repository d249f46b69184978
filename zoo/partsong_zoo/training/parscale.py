"""Trains streams on a frozen backbone ("recycling") or together with it, by accelerate.

One function does the three settings of the paper (Chen et al., arXiv 2505.10475). Training from nothing is
`train(model, weights)` with random weights. A second stage is the same with a trained model. Recycling is
`frozen=True`, which leaves every weight of the backbone as it is, so one backbone serves any number of streams. With
weights=None the base model itself is trained. The paper makes its prefixes by a network that is dropped after training;
here they are trained directly.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import StreamWeights

__all__ = ["StreamLesson", "learning_rate", "next_token_loss", "train"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamLesson:
    """Holds the texts of one step, with padding at the end.

    Attributes:
        ids: token ids, `[batch, tokens]`.
        learned: which of them are predicted, bool `[batch, tokens]`; the first of a row never is.
    """

    ids: Tensor
    learned: Tensor


def next_token_loss(model: nn.Module, lesson: StreamLesson) -> Tensor:
    """Computes the summed negative log-likelihood of a lesson's learned tokens, in nats.

    Args:
        model: a causal language model of transformers.
        lesson: the texts to learn.

    Returns:
        A scalar in float32, or in float64 if the model is.
    """
    logits = model(input_ids=lesson.ids, use_cache=False).logits[:, :-1]
    learned = lesson.learned[:, 1:]
    exact = logits[learned].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact, lesson.ids[:, 1:][learned], reduction="sum")


def learning_rate(step: int, steps: int, warm: float = 0.05) -> float:
    """Returns the share of the peak rate at a step: a linear warm-up, then a cosine to zero.

    >>> [round(learning_rate(step, 100), 2) for step in (0, 4, 50, 99)]
    [0.2, 1.0, 0.54, 0.0]
    """
    rising = (step + 1) / max(1.0, warm * steps)
    return min(rising, 0.5 + 0.5 * math.cos(math.pi * max(0.0, step - warm * steps) / (steps - warm * steps)))


class _Together(nn.Module):
    """Joins backbone and streams in one module, so that gradients of both are averaged between ranks."""

    def __init__(self, model: nn.Module, weights: StreamWeights | None) -> None:
        super().__init__()
        self.model, self.weights = model, weights

    def forward(self, ids: Tensor, learned: Tensor) -> Tensor:
        return next_token_loss(self.model, StreamLesson(ids, learned))


def train(
    model: PreTrainedModel,
    weights: StreamWeights | None,
    draw: Callable[[int], StreamLesson],
    *,
    steps: Count,
    rate: float = 3e-3,
    prefix_rate: float | None = None,
    frozen: bool = False,
    folder: Path | None = None,
    save_every: Count = 200,
    rows_at_once: Count | None = None,
    accelerator: Accelerator | None = None,
) -> list[float]:
    """Trains by AdamW, with gradients clipped to norm 1, and continues from a checkpoint if there is one.

    On several ranks (`accelerate launch`) each takes every n-th row of the same lesson. The loss is the mean over all
    learned tokens of all ranks, so the number of ranks changes only the rounding.

    Args:
        model: the backbone, without ParScale attached; it is attached while this runs.
        weights: the streams; None trains the base model.
        draw: returns the lesson of a step, the same each time.
        steps: how many steps there are in all, including those before a stop.
        rate: the peak learning rate.
        prefix_rate: the peak learning rate of the prefixes. Default: `rate`. If it is a few times higher, streams come
            apart sooner. If the aggregator's rate were as high, it would settle on one of them.
        frozen: whether only the streams learn.
        folder: where `training.pt` is kept; None keeps nothing.
        save_every: steps between checkpoints.
        rows_at_once: rows per forward of a rank, to save memory. Default: all.
        accelerator: device, ranks and precision. Default: `Accelerator()`.

    Returns:
        The loss of every step of this call, in nats per learned token.

    Raises:
        ArgumentError: a number is out of bounds, a frozen backbone has no streams, or there are fewer rows than ranks.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> lesson = StreamLesson(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[False, True, True, True]]))
    >>> place = Accelerator(cpu=True)
    >>> losses = train(model, StreamWeights.new(model, 2), lambda step: lesson, steps=9, accelerator=place)
    >>> losses[-1] < losses[0]
    True
    """
    check_knobs(type_hints(train), {"steps": steps, "save_every": save_every, "rows_at_once": rows_at_once})
    if frozen and weights is None:
        raise ArgumentError("frozen=True without streams: nothing would be learned; give weights")
    place = accelerator or Accelerator()
    together = _Together(model, weights)
    streams = () if weights is None else (weights,)
    with ParScale(model, *streams), _learning(model, frozen):
        learned = [each for each in together.parameters() if each.requires_grad]
        groups = _groups(learned, weights, rate, prefix_rate)
        peaks = [group["lr"] for group in groups]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
        path = None if folder is None else folder / "training.pt"
        step = _resume(path, together, optimizer, frozen)
        ready, ready_optimizer = place.prepare(together, optimizer)
        losses = list[float]()
        while step < steps:
            for group, peak in zip(ready_optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * learning_rate(step, steps)
            losses.append(_step(ready, ready_optimizer, learned, _own_rows(draw(step), place), rows_at_once, place))
            step += 1
            if path is not None and (step % save_every == 0 or step == steps) and place.is_main_process:
                _save(path, together, optimizer, frozen, step)
            if step % 100 == 0 and place.is_main_process:
                _log.info("step %d of %d, loss %.4f", step, steps, sum(losses[-100:]) / len(losses[-100:]))
        optimizer.zero_grad()  # gradients take as much memory as the weights, and are no longer needed
    return losses


def _groups(
    learned: list[nn.Parameter], weights: StreamWeights | None, rate: float, prefix_rate: float | None
) -> list[dict[str, Any]]:
    """Groups prefixes and all other parameters, each group with its peak rate."""
    prefixes = {id(each) for each in (*weights.prefix_k, *weights.prefix_v)} if weights is not None else set[int]()
    both = [[each for each in learned if (id(each) in prefixes) == kind] for kind in (False, True)]
    peaks = (rate, rate if prefix_rate is None else prefix_rate)
    return [{"params": each, "lr": peak} for each, peak in zip(both, peaks, strict=True) if each]


@dataclass(frozen=True, slots=True)
class _Share:
    """Holds a rank's rows, and how many tokens all ranks learn together."""

    rows: StreamLesson
    count: int


def _own_rows(lesson: StreamLesson, place: Accelerator) -> _Share:
    if len(lesson.ids) < place.num_processes:
        raise ArgumentError(f"a lesson has {len(lesson.ids)} rows for {place.num_processes} ranks: draw more rows")
    mine = slice(place.process_index, None, place.num_processes)
    rows = StreamLesson(lesson.ids[mine].to(place.device), lesson.learned[mine].to(place.device))
    return _Share(rows, int(lesson.learned[:, 1:].sum()))


def _step(
    together: Any, optimizer: Any, learned: list[nn.Parameter], share: _Share, rows: int | None, place: Accelerator
) -> float:
    """Makes one step of the optimizer; returns the loss over all ranks."""
    optimizer.zero_grad()
    size = rows or len(share.rows.ids)
    parts = list(zip(share.rows.ids.split(size), share.rows.learned.split(size), strict=True))
    total = torch.zeros((), device=place.device)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        with nullcontext() if last else place.no_sync(together):
            loss = together(*part) / share.count
            # Gradients are averaged over ranks, but should be summed.
            place.backward(loss * place.num_processes)
        total = total + loss.detach()
    place.clip_grad_norm_(learned, 1.0)
    optimizer.step()
    loss_of_all: Any = place.reduce(total, "sum")
    return float(loss_of_all)


@contextmanager
def _learning(model: PreTrainedModel, frozen: bool) -> Iterator[None]:
    """Puts the model into training mode, or freezes it; afterwards mode and flags are as before."""
    before, mode = [each.requires_grad for each in model.parameters()], model.training
    if frozen:
        model.requires_grad_(False)
    model.train(not frozen)
    try:
        yield
    finally:
        model.train(mode)
        for each, flag in zip(model.parameters(), before, strict=True):
            each.requires_grad_(flag)


def _resume(path: Path | None, together: _Together, optimizer: torch.optim.Optimizer, frozen: bool) -> int:
    if path is None or not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["frozen"] != frozen:
        raise ArgumentError(f"{path} comes from a run with frozen={state['frozen']}; give another folder")
    part: nn.Module = _saved_part(together, frozen)
    part.load_state_dict(state["weights"])
    optimizer.load_state_dict(state["optimizer"])
    _log.info("%s: goes on at step %d", path, state["step"])
    return state["step"]


def _save(path: Path, together: _Together, optimizer: torch.optim.Optimizer, frozen: bool, step: int) -> None:
    """Writes the checkpoint, replacing the old one at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "frozen": frozen,
        "weights": _saved_part(together, frozen).state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _saved_part(together: _Together, frozen: bool) -> nn.Module:
    if not frozen:
        return together
    assert together.weights is not None
    return together.weights
