"""Training on texts of threads: the likelihood of what a model wrote, and one step of descent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from partsong.reasoning.training.thread_batch import ThreadBatch, additive_mask, flex_mask

__all__ = ["ThreadLesson", "learned_logits", "log_likelihoods", "supervised_loss", "train_step"]


def learned_logits(model: PreTrainedModel, batch: ThreadBatch, thoughts: ThoughtEmbeddings | None = None) -> Tensor:
    """Logits that predict the learned tokens.

    Args:
        model: a decoder of transformers that takes a mask per query and key: with eager, sdpa or flex attention.
        batch: texts; on the model's device.
        thoughts: embeddings of the batch's marks, attached to the model.

    Returns:
        `[learned tokens, vocabulary]`, rows first, then columns.

    Raises:
        UnsupportedError: another kind of attention, or a batch with marks and no thought embeddings.
    """
    if thoughts is None and bool(batch.marks.any()):
        raise UnsupportedError("the batch has marks: give thoughts=ThoughtEmbeddings.of(model), attached to the model")
    decoder: Any = model.get_decoder()
    with nullcontext() if thoughts is None else thoughts.at(batch.marks):
        hidden = decoder(
            input_ids=batch.ids,
            attention_mask=_mask_for(model, batch),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
    rows, columns = batch.learn.nonzero(as_tuple=True)
    head: Any = model.get_output_embeddings()
    return head(hidden[rows, batch.sources[rows, columns]])


def _mask_for(model: PreTrainedModel, batch: ThreadBatch) -> Any:
    kind = model.config._attn_implementation
    if kind == "eager":
        return additive_mask(batch.mask, model.dtype)
    if kind == "sdpa":
        return batch.mask
    if kind == "flex_attention":
        return flex_mask(batch.mask)
    raise UnsupportedError(f"attention {kind!r} takes no mask of threads; use 'eager', 'sdpa' or 'flex_attention'")


def log_likelihoods(
    model: PreTrainedModel, batch: ThreadBatch, *, temperature: float = 1.0, thoughts: ThoughtEmbeddings | None = None
) -> Tensor:
    """Natural log-probabilities of the learned tokens, float32 or wider, `[learned tokens]`.

    Args:
        model: as in `learned_logits`.
        batch: texts.
        temperature: logits are divided by it: that of the draw, where tokens were drawn.
        thoughts: as in `learned_logits`.

    Raises:
        ArgumentError: a temperature that is not above 0.
        UnsupportedError: as in `learned_logits`.
    """
    if temperature <= 0:
        raise ArgumentError(f"temperature={temperature}; use a number above 0")
    logits = learned_logits(model, batch, thoughts)
    # Half-precision logits would round the probabilities that matter most, those near 1.
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return -F.cross_entropy(logits / temperature, batch.ids[batch.learn], reduction="none")


def supervised_loss(model: PreTrainedModel, batch: ThreadBatch, thoughts: ThoughtEmbeddings | None = None) -> Tensor:
    """Mean negative log-likelihood of the learned tokens, in nats; each counts once, whatever text it is of.

    Raises:
        ArgumentError: nothing is learned in the batch.
        UnsupportedError: as in `learned_logits`.
    """
    if not bool(batch.learn.any()):
        raise ArgumentError("no token of the batch is learned: what a model is to write are the texts' pieces")
    return -log_likelihoods(model, batch, thoughts=thoughts).mean()


class ThreadLesson(nn.Module):
    """A model and its loss as one module, so that what wraps modules (accelerate, DDP) sees the whole forward.

    Args:
        model: what is trained.
        thoughts: trained with it, attached to it.
    """

    def __init__(self, model: PreTrainedModel, thoughts: ThoughtEmbeddings | None = None) -> None:
        super().__init__()
        self.model, self.thoughts = model, thoughts

    def forward(self, batch: ThreadBatch, temperature: float | None = None) -> Tensor:
        """The supervised loss, or where a temperature is given, the log-likelihoods of the learned tokens at it."""
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
    """One step of descent.

    Args:
        accelerator: of accelerate.
        loss: of the batch.
        parameters: what is trained.
        optimizers: each with its peak learning rate.
        scale: of all learning rates.
        clip: most the gradient's norm may be.

    Returns:
        The norm of the gradient before it was clipped.
    """
    # Not by the optimizers: one may see the parameters through views that have gradients of their own.
    for parameter in parameters:
        parameter.grad = None
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(parameters, clip)
    for optimizer, peak in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = scale * peak
        optimizer.step()
    return float(norm)
