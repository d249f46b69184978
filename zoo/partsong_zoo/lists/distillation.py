"""Holds the losses that teach a masked language model to decide more tokens per forward, as pure functions of logits.

Logits are `[batch, length, vocabulary]`, tokens int64 `[batch, length]`, and `where` bool `[batch, length]` says which
positions count. Every loss is a scalar in nats. A mean over no positions is 0. Importing this module loads torch.

Sources: certainty forcing, dParallel (arXiv 2509.26488) and d3LLM; consistency, CLLM (arXiv 2403.00835), here between
states of a masked model; discrimination, T3D (arXiv 2602.12262); own guesses, DMax (arXiv 2604.08302); revision, ReDiff
(arXiv 2510.19871); reinforcement, LightningRL (arXiv 2603.13319).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from partsong.errors import ArgumentError
from partsong.knobs import Number, check_knobs, type_hints
from partsong_zoo.training.policy_loss import policy_loss

__all__ = [
    "GroupAdvantages",
    "certain_entropy",
    "certainty_loss",
    "consistency_loss",
    "discrimination_loss",
    "group_advantages",
    "masked_loss",
    "mean_log_prob",
    "own_guess",
    "reinforcement_loss",
    "revision_loss",
]

#: A factor of a term of a loss.
Weight = Annotated[float, Number(0.0)]
#: What logits are divided by.
Heat = Annotated[float, Number(0.0, above=True)]
#: A group of answers whose speeds differ by less teaches nothing about speed.
LEAST_RANGE = 0.01


def _mean(values: Tensor) -> Tensor:
    """Returns the mean, which is 0, with a gradient of 0, of no values."""
    return values.sum() / max(values.numel(), 1)


def masked_loss(logits: Tensor, targets: Tensor, where: Tensor) -> Tensor:
    """Returns the mean cross-entropy of the targets.

    >>> masked_loss(torch.zeros(1, 2, 4), torch.tensor([[1, 2]]), torch.tensor([[True, False]])).exp()
    tensor(4.)
    """
    return _mean(F.cross_entropy(logits[where].float(), targets[where], reduction="none"))


def certain_entropy(logits: Tensor, targets: Tensor, where: Tensor, *, temperature: Heat = 0.5) -> Tensor:
    """Returns the mean entropy at the positions whose likeliest token is the target already.

    It acts on what the model knows and leaves alone what it gets wrong, where certainty would be an error.

    Args:
        logits: `[batch, length, vocabulary]`.
        targets: the right tokens.
        where: positions that count.
        temperature: of the distribution whose entropy it is. Below 1 it is small where the model is nearly sure, so
            that the gradient goes to the doubtful ones.
    """
    chosen = logits[where & (logits.argmax(-1) == targets)].float() / temperature
    log_probs = chosen.log_softmax(-1)
    return _mean(-(log_probs.exp() * log_probs).sum(-1))


def certainty_loss(
    logits: Tensor, targets: Tensor, where: Tensor, *, weight: Weight = 2.0, temperature: Heat = 0.5
) -> Tensor:
    """Returns the cross-entropy of the targets, and `weight` times the entropy where the model is right (dParallel).

    Args:
        logits: `[batch, length, vocabulary]`.
        targets: tokens of a trajectory of the teacher.
        where: masked positions.
        weight: of the entropy; with 0 it is `masked_loss`.
        temperature: as in `certain_entropy`.

    Raises:
        ArgumentError: a knob is out of bounds.

    >>> logits = torch.tensor([[[2.0, 0.0]]])
    >>> target, where = torch.tensor([[0]]), torch.tensor([[True]])
    >>> bool(certainty_loss(logits, target, where) > masked_loss(logits, target, where))
    True
    """
    check_knobs(type_hints(certainty_loss), {"weight": weight, "temperature": temperature})
    loss = masked_loss(logits, targets, where)
    return loss + weight * certain_entropy(logits, targets, where, temperature=temperature) if weight else loss


def consistency_loss(early: Tensor, late: Tensor, where: Tensor) -> Tensor:
    """Returns how far an early state's distributions are from those of a later state of the same trajectory.

    The later ones are the target and have no gradient. It is a cross-entropy, least where both distributions are equal;
    then it is their entropy.

    Args:
        early: logits at a state with few tokens decided.
        late: logits at a state with more of them, next to it (local consistency) or far ahead (global consistency).
        where: positions that are masked in both.
    """
    target = late[where].detach().float().softmax(-1)
    return _mean(-(target * early[where].float().log_softmax(-1)).sum(-1))


def mean_log_prob(logits: Tensor, tokens: Tensor, where: Tensor) -> Tensor:
    """Returns for each row the mean log-probability of its tokens, `[batch]`; 0 for a row without positions."""
    log_probs = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return torch.where(where, log_probs, 0.0).sum(1) / where.sum(1).clamp(min=1)


def discrimination_loss(
    real: tuple[Tensor, Tensor], fake: tuple[Tensor, Tensor], *, beta: Heat = 0.1, alpha: Weight = 0.5
) -> Tensor:
    """Returns T3D's loss: against the reference, the student favours texts of many steps and avoids those of one step.

    With the gain g = beta (student - reference) it is ``-log sigmoid(g(real)) - alpha log(1 - sigmoid(g(fake)))``.

    Args:
        real: mean log-probabilities `[batch]` of the texts that many steps decoded, by the student and the reference.
        fake: those of the texts that one step decoded.
        beta: how strongly a log-probability counts. Means over tokens are small numbers, and so is their gradient.
        alpha: weight of the fake texts; with 0 they do not count.

    Raises:
        ArgumentError: a knob is out of bounds.

    >>> zero = torch.zeros(1)
    >>> discrimination_loss((zero, zero), (zero, zero), alpha=1.0) / torch.tensor(2.0).log()
    tensor(2.)
    """
    check_knobs(type_hints(discrimination_loss), {"beta": beta, "alpha": alpha})
    wanted = beta * (real[0] - real[1].detach())
    unwanted = beta * (fake[0] - fake[1].detach())
    return -(F.logsigmoid(wanted) + alpha * F.logsigmoid(-unwanted)).mean()


def own_guess(logits: Tensor, tokens: Tensor, where: Tensor, *, barred: int | None = None) -> Tensor:
    """Returns the tokens with the likeliest ones in place of the masks: what one step would decide (OPUT).

    Args:
        logits: of a forward of the masked tokens; the guess has no gradient.
        tokens: int64 `[batch, length]`.
        where: masked positions.
        barred: a token that is never guessed, such as the mask.
    """
    logits = logits.detach()
    if barred is not None:
        logits = logits.index_fill(-1, torch.tensor([barred], device=logits.device), -torch.inf)
    return torch.where(where, logits.argmax(-1), tokens)


def revision_loss(logits: Tensor, draft: Tensor, expert: Tensor, where: Tensor) -> Tensor:
    """Returns the cross-entropy of an expert's tokens at the positions where it changed the draft (ReDiff's stage 2).

    Args:
        logits: of a forward of the draft.
        draft: the tokens that were read.
        expert: the expert's tokens.
        where: positions of the answer.
    """
    return masked_loss(logits, expert, where & (draft != expert))


# --- reinforcement ----------------------------------------------------------------------------------------------------


class GroupAdvantages(NamedTuple):
    """Holds what `group_advantages` computes.

    Attributes:
        values: advantages `[groups, answers]`, 0 in groups that are dropped.
        kept: bool `[groups]`.
    """

    values: Tensor
    kept: Tensor


def _standard(values: Tensor, dim: int | None = None) -> Tensor:
    """Returns how many standard deviations values are from their mean; 0 where all are equal."""
    if dim is None:
        centred = values - values.mean()
        spread = centred.square().mean().sqrt()
    else:
        centred = values - values.mean(dim, keepdim=True)
        spread = centred.square().mean(dim, keepdim=True).sqrt()
    return torch.where(spread > 1e-8, centred / spread.clamp(min=1e-8), 0.0)


def group_advantages(right: Tensor, speed: Tensor) -> GroupAdvantages:
    """Returns the advantages of answers that should be right and decided in few forwards (LightningRL).

    Within the answers to one prompt, both rightness and speed are brought to mean 0 and deviation 1 and added. The sums
    are standardised once more over the groups that are kept. A group is dropped if all of its answers are wrong, or if
    their speeds are within 0.01 of each other.

    Args:
        right: bool `[groups, answers]`.
        speed: tokens per forward, `[groups, answers]`.

    Raises:
        ArgumentError: the shapes differ.

    >>> group_advantages(torch.tensor([[True, False]]), torch.tensor([[2.0, 1.0]])).values
    tensor([[ 1., -1.]])
    """
    if right.shape != speed.shape or right.ndim != 2:
        raise ArgumentError(
            f"right has shape {tuple(right.shape)}, speed {tuple(speed.shape)}; give both [groups, answers]"
        )
    speed = speed.float()
    kept = right.any(1) & (speed.amax(1) - speed.amin(1) >= LEAST_RANGE)
    sums = _standard(right.float(), 1) + _standard(speed, 1)
    values = torch.zeros_like(sums)
    if kept.any():
        values[kept] = _standard(sums[kept])
    return GroupAdvantages(values, kept)


def reinforcement_loss(
    new: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    right: Tensor,
    *,
    clip: Weight = 0.2,
    likelihood_weight: Weight = 0.1,
    divergence_weight: Heat = 0.01,
) -> Tensor:
    """Returns LightningRL's loss of the tokens of sampled answers.

    It is the clipped surrogate of `policy_loss`, with its pull towards a reference, and the negative log-likelihood of
    the right answers' tokens.

    Args:
        new: log-probabilities with gradient, `[tokens]`, each at the state in which its token was decided.
        old: those of the model that drew the tokens.
        reference: those of the teacher.
        advantages: of each token's answer.
        right: bool, whether each token's answer is right.
        clip: how far the ratio of probabilities may move from 1.
        likelihood_weight: of the right answers' likelihood.
        divergence_weight: of the pull towards the teacher.

    Raises:
        ArgumentError: shapes differ, there are no tokens, or a knob is out of bounds.
    """
    knobs = {"clip": clip, "likelihood_weight": likelihood_weight, "divergence_weight": divergence_weight}
    check_knobs(type_hints(reinforcement_loss), knobs)
    texts = torch.zeros(len(new), dtype=torch.int64, device=new.device)
    loss = policy_loss(
        new,
        old,
        advantages,
        texts,
        clip=(clip, clip),
        reference=reference,
        divergence_weight=divergence_weight,
    ).loss
    return loss - likelihood_weight * _mean(new[right])
