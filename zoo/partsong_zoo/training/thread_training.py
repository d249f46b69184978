"""Trains on texts of threads: computes the likelihood of a model's text, and makes steps of descent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import AboveZero, check_knobs, type_hints
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from partsong_zoo.training.thread_batch import ThreadBatch, additive_mask, flex_mask

__all__ = ["ThreadLesson", "learned_logits", "log_likelihoods", "mask_for", "supervised_loss", "train_step"]


def learned_logits(model: PreTrainedModel, batch: ThreadBatch, thoughts: ThoughtEmbeddings | None = None) -> Tensor:
    """Computes the logits that predict the learned tokens.

    Args:
        model: a decoder of transformers that takes a mask per query and key: with eager, sdpa or flex attention.
        batch: the texts, on the model's device.
        thoughts: embeddings of the batch's marks, attached to the model.

    Returns:
        `[learned tokens, vocabulary]`, rows first, then columns.

    Raises:
        UnsupportedError: the model has another kind of attention, or there are marks and no thought embeddings.
    """
    if thoughts is None and bool(batch.marks.any()):
        raise UnsupportedError("the batch has marks: give thoughts=ThoughtEmbeddings.of(model), attached to the model")
    decoder: Any = model.get_decoder()
    with nullcontext() if thoughts is None else thoughts.at(batch.marks):
        hidden = decoder(
            input_ids=batch.ids,
            attention_mask=mask_for(model, batch.mask),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
    rows, columns = batch.learn.nonzero(as_tuple=True)
    head: Any = model.get_output_embeddings()
    return head(hidden[rows, batch.sources[rows, columns]])


def mask_for(model: PreTrainedModel, mask: Tensor) -> Any:
    """Turns a mask into the form that a model's attention takes.

    Args:
        model: a decoder of transformers.
        mask: who sees whom, bool `[rows, 1, queries, keys]`.

    Raises:
        UnsupportedError: the model has another kind of attention than eager, sdpa or flex.
    """
    kind = model.config._attn_implementation
    if kind == "eager":
        return additive_mask(mask, model.dtype)
    if kind == "sdpa":
        return mask
    if kind == "flex_attention":
        return flex_mask(mask)
    raise UnsupportedError(f"attention {kind!r} takes no mask of threads; use 'eager', 'sdpa' or 'flex_attention'")


def log_likelihoods(
    model: PreTrainedModel,
    batch: ThreadBatch,
    *,
    temperature: AboveZero = 1.0,
    thoughts: ThoughtEmbeddings | None = None,
) -> Tensor:
    """Computes natural log-probabilities of the learned tokens, float32 or wider, `[learned tokens]`.

    Args:
        model: as in `learned_logits`.
        batch: the texts.
        temperature: divides the logits; for drawn tokens, the temperature of the draw.
        thoughts: as in `learned_logits`.

    Raises:
        ArgumentError: the temperature is not above 0.
        UnsupportedError: as in `learned_logits`.
    """
    check_knobs(type_hints(log_likelihoods), {"temperature": temperature})
    logits = learned_logits(model, batch, thoughts)
    # Half-precision logits would round the probabilities that matter most, those near 1.
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return -F.cross_entropy(logits / temperature, batch.ids[batch.learn], reduction="none")


def supervised_loss(model: PreTrainedModel, batch: ThreadBatch, thoughts: ThoughtEmbeddings | None = None) -> Tensor:
    """Computes the mean negative log-likelihood of the learned tokens, in nats; each token of any text counts once.

    Raises:
        ArgumentError: the batch has no learned tokens.
        UnsupportedError: as in `learned_logits`.
    """
    if not bool(batch.learn.any()):
        raise ArgumentError("no token of the batch is learned: put what the model is to write into pieces of the texts")
    return -log_likelihoods(model, batch, thoughts=thoughts).mean()


class ThreadLesson(nn.Module):
    """Joins a model and its loss in one module, so that wrappers (accelerate, DDP) see the whole forward.

    Args:
        model: the model that is trained.
        thoughts: embeddings that are trained with it and attached to it.
    """

    def __init__(self, model: PreTrainedModel, thoughts: ThoughtEmbeddings | None = None) -> None:
        super().__init__()
        self.model, self.thoughts = model, thoughts

    def forward(self, batch: ThreadBatch, temperature: float | None = None) -> Tensor:
        """Computes the supervised loss or, if a temperature is given, the learned tokens' log-likelihoods at it."""
        if temperature is None:
            return supervised_loss(self.model, batch, self.thoughts)
        return log_likelihoods(self.model, batch, temperature=temperature, thoughts=self.thoughts)


def train_step(
    accelerator: Any,
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    optimizers: Sequence[tuple[torch.optim.Optimizer, float]],
    *,
    scale: float = 1.0,
    clip: float = 1.0,
) -> float:
    """Makes one step of descent.

    Args:
        accelerator: an `Accelerator` of accelerate.
        loss: the loss of the batch.
        parameters: the parameters that are trained.
        optimizers: each with its peak learning rate.
        scale: factor on all learning rates.
        clip: the largest norm the gradient may have.

    Returns:
        The norm of the gradient before it was clipped.
    """
    # Optimizers cannot do this: one may see the parameters through views that have gradients of their own.
    for parameter in parameters:
        parameter.grad = None
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(parameters, clip)
    for optimizer, peak in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = scale * peak
        optimizer.step()
    return float(norm)
