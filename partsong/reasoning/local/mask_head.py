"""Holds a head that guesses several tokens ahead of a frozen model: masks that look ahead, and a sampler.

The masks' states predict the next positions independently. The sampler goes over them from left to right, and knows
at each which token was drawn last (multi-token prediction, arXiv 2507.11851, sections 3.1 and 3.3).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from partsong.errors import ArgumentError
from partsong.knobs import AboveZero, Count, Whole, check_fields
from partsong.reasoning.local.gated_lora import GatedLora

__all__ = ["HeadSettings", "MaskHead", "SamplerHead", "digest_of", "embed", "load_head", "read", "save_head"]

_SETTINGS, _WEIGHTS = "head.json", "head.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Describes a head and the model it was trained for.

    Attributes:
        num_masks: how many masks may follow a token.
        rank: the rank of the changes that masks see.
        alpha: how much these count, times the rank.
        hidden_size: the size of the model's states.
        vocab_size: how many tokens it has.
        vocabulary: a digest of them (see `digest_of`).

    Raises:
        ArgumentError: one is out of bounds.
    """

    num_masks: Count
    rank: Annotated[int, Whole(0)]
    alpha: AboveZero
    hidden_size: Count
    vocab_size: Count
    vocabulary: str

    def __post_init__(self) -> None:
        check_fields(self)


def embed(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Returns the embeddings of tokens, as a sampler reads them."""
    table: Any = model.get_input_embeddings()
    return F.embedding(tokens, table.weight)


def read(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Computes the logits of states with the model's own head."""
    head: Any = model.get_output_embeddings()
    scale: float = getattr(model.config, "logits_scaling", 1.0)
    return head(states) if scale == 1.0 else head(states) / scale


def digest_of(vocabulary: Mapping[str, int]) -> str:
    """Returns a short digest of a tokenizer's tokens and their ids.

    >>> digest_of({"a": 0, "b": 1}) == digest_of({"b": 1, "a": 0})
    True
    """
    text = json.dumps(sorted(vocabulary.items()))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class SamplerHead(nn.Module):
    """Predicts what follows a token, from its embedding and the state of the mask at its position.

    Two layers change the mask's state, initially not at all. The model's own head reads the result.

    Args:
        width: the size of states and embeddings.

    >>> import torch
    >>> sampler, states = SamplerHead(4), torch.randn(5, 4)
    >>> bool((sampler(states, torch.randn(5, 4)) == states).all())
    True
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * width, width)
        self.second = nn.Linear(width, width)
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        nn.init.zeros_(self.second_norm.weight)

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        """Computes states that the model's head reads.

        Args:
            states: those of masks, `[..., width]`.
            before: the embedding of the token at each mask's place, of the same shape. The guess is what follows it.
        """
        return self.step(states, self.prepare(states), before)

    def prepare(self, states: Tensor) -> Tensor:
        """Computes what does not depend on tokens, for all masks at once."""
        return F.linear(states, self.first.weight[:, : states.shape[-1]], self.first.bias)

    def step(self, states: Tensor, prepared: Tensor, before: Tensor) -> Tensor:
        """Continues from the result of `prepare`; arguments and result as in `forward`."""
        inside = prepared + F.linear(before, self.first.weight[:, states.shape[-1] :])
        inside = _normed(F.silu(inside), self.first_norm)
        inside = F.linear(inside, self.second.weight, self.second.bias)
        return states + _normed(F.silu(inside), self.second_norm)


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class MaskHead(nn.Module):
    """Joins the masks of a head and its sampler.

    Attributes:
        settings: its sizes, and the model it is for.
        masks: the masks, with the changes that only they see.
        sampler: the sampler.

    Args:
        settings: see above.
        masks: see above.
    """

    def __init__(self, settings: HeadSettings, masks: GatedLora) -> None:
        super().__init__()
        self.settings, self.masks, self.sampler = settings, masks, SamplerHead(settings.hidden_size)

    @classmethod
    def of(
        cls, model: PreTrainedModel, vocabulary: Mapping[str, int], *, num_masks: int, rank: int, alpha: float
    ) -> MaskHead:
        """Makes a head to be trained for a model.

        Args:
            model: the model.
            vocabulary: its tokenizer's tokens with their ids.
            num_masks: see `HeadSettings`.
            rank: see `HeadSettings`.
            alpha: see `HeadSettings`.

        Raises:
            UnsupportedError: the model has no linear layers.
        """
        masks = GatedLora.of(model, num_masks=num_masks, rank=rank, alpha=alpha)
        head: Any = model.get_output_embeddings()
        settings = HeadSettings(
            num_masks=num_masks,
            rank=rank,
            alpha=alpha,
            hidden_size=masks.masks.shape[1],
            vocab_size=len(head.weight),
            vocabulary=digest_of(vocabulary),
        )
        return cls(settings, masks).to(masks.masks.device, masks.masks.dtype)


def save_head(head: MaskHead, folder: Path) -> None:
    """Saves a head as a folder of two files, in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SETTINGS).write_text(json.dumps(asdict(head.settings), indent=2) + "\n")
    tensors = {name: each.detach().half().contiguous() for name, each in head.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def load_head(folder: Path) -> MaskHead:
    """Loads a head that `save_head` has saved, in float32 on the CPU.

    Raises:
        ArgumentError: there is none, or its files do not fit together.
    """
    for name in (_SETTINGS, _WEIGHTS):
        if not (folder / name).is_file():
            raise ArgumentError(
                f"{folder} holds no trained head: it has no {name}; zoo/recipes/train_heads.py trains one, and "
                f"head:path=FOLDER takes it"
            )
    try:
        settings = HeadSettings(**json.loads((folder / _SETTINGS).read_text(encoding="utf-8")))
        tensors = load_file(folder / _WEIGHTS)
        down, up = (_matrices(tensors, name) for name in ("down", "up"))
        sizes = {name.replace("/", "."): (down[name].shape[1], up[name].shape[0]) for name in down}
        width, num, rank = settings.hidden_size, settings.num_masks, settings.rank
        head = MaskHead(settings, GatedLora(sizes, width=width, num_masks=num, rank=rank, alpha=settings.alpha))
        head.load_state_dict(tensors)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ArgumentError(f"{folder} holds no head that can be read: {reason}") from error
    return head.eval().requires_grad_(False)


def _matrices(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    begin = f"masks.{kind}."
    return {name.removeprefix(begin): each for name, each in tensors.items() if name.startswith(begin)}
