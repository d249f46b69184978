"""Refuses drafters that read other tokens than the model, or sit on another device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partsong.errors import UnsupportedError
from partsong.reasoning.local.loading import LoadedModel
from partsong.reasoning.local.model import LocalModel

__all__ = ["check_same_tokens", "check_same_vocabulary"]


def check_same_vocabulary(drafter: LoadedModel, model: LocalModel, tokenizer: Any) -> None:
    """Checks that two models of one process mean the same by a token.

    Raises:
        UnsupportedError: they do not, or the drafter is on another device.
    """
    check_same_tokens(drafter, tokenizer.get_vocab())
    if drafter.module.device != model.device:
        raise UnsupportedError(
            f"{drafter.name} cannot draft for this model: it is on {drafter.module.device}, the model on "
            f"{model.device}; move it there"
        )


def check_same_tokens(drafter: LoadedModel, other: Mapping[str, int]) -> None:
    """Checks that a drafter has the vocabulary of the model that it drafts for.

    Raises:
        UnsupportedError: it has another one.
    """
    own = drafter.tokenizer.get_vocab()
    if own != other:
        token = min(word for word in {**own, **other} if own.get(word) != other.get(word))
        raise UnsupportedError(
            f"{drafter.name} cannot draft for this model: its vocabulary has {len(own)} tokens, that of the model "
            f"{len(other)}, and they differ, for example at {token!r}; use a drafter with the model's own tokenizer"
        )
