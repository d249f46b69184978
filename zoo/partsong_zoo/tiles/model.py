"""Builds the `tiles` transformer: a stock Llama that predicts tokens of a picture, in any order and several at once.

One embedding holds words, places and codes. A token that is known goes in as the sum of its code and its place, and a
question as the sum of `<query>` and the place that it asks for. Which of them see each other is all that a mask says:
tokens are decided in groups, a known token sees the caption and the groups up to its own, and a question sees the
caption, the groups before its own and the other questions of its group. Locality-aware parallel decoding, arXiv
2507.01957. Importing this module loads torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from partsong_zoo.shapes.model import TEXT_LENGTH, VOCABULARY

__all__ = ["build_model", "code_logits", "embed", "group_logits", "group_loss", "training_mask"]

PAD = 0
#: What a masked logit is lowered by; float16 has no much larger numbers.
HIDDEN = -1e4
_HEAD_WIDTH = 32


def build_model(heads: int = 4, depth: int = 6, *, grid: int = 8, num_codes: int = 625) -> LlamaForCausalLM:
    """Makes a Llama of random weights.

    Args:
        heads: attention heads of 32 channels.
        depth: layers.
        grid: tokens along a side of a picture.
        num_codes: how many codes a token may have.

    Returns:
        A stock module; its vocabulary is the words of captions, `<query>`, the places and the codes, in this order.
    """
    width, places = _HEAD_WIDTH * heads, grid**2
    config = LlamaConfig(
        vocab_size=len(VOCABULARY) + 1 + places + num_codes,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        max_position_embeddings=TEXT_LENGTH + places,
        # Few positions: a small base tells neighbours apart in most channels.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=3,
    )
    config.partsong_adapter = "tiles"
    config.partsong_grid = grid
    config.partsong_codes = num_codes
    return LlamaForCausalLM(config)


def training_mask(sizes: list[int], words: Tensor) -> Tensor:
    """Returns the additive mask of one forward of training, `[B, 1, length, length]`.

    The caption stands first, then the known tokens, which are those of all groups but the last, then the questions.

    Args:
        sizes: sizes of the groups.
        words: ids of the captions, int64 `[B, P]`, padded with 0.
    """
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    known = groups[: len(groups) - sizes[-1]]
    # Even numbers are known tokens, odd ones questions, and a known token comes after its own question.
    rank = torch.cat([torch.zeros(words.shape[1]).long(), 2 * known + 2, 2 * groups + 1]).to(words.device)
    sees = (rank[:, None] == rank) | ((rank % 2 == 0) & (rank < rank[:, None]))
    sees = sees.expand(len(words), -1, -1).clone()
    sees[:, :, : words.shape[1]] &= (words != PAD)[:, None, :]
    return torch.zeros(sees.shape, device=words.device).masked_fill(~sees, HIDDEN)[:, None]


def embed(model: Any, ids: Tensor, places: Tensor | None = None) -> Tensor:
    """Embeds words, or codes at places; code -1 asks for the code of its place.

    Args:
        model: of `build_model`.
        ids: int64, ids of words, or codes where `places` are given.
        places: int64, the places, row after row.
    """
    table = model.get_input_embeddings()
    if places is None:
        return table(ids)
    query = len(VOCABULARY)
    first_place, first_code = query + 1, query + 1 + model.config.partsong_grid**2
    return table(first_place + places) + table(torch.where(ids < 0, query, first_code + ids))


def code_logits(model: Any, hidden: Tensor) -> Tensor:
    """Returns logits of the codes alone, from hidden states behind the last norm."""
    return hidden @ model.get_output_embeddings().weight[-model.config.partsong_codes :].T


def group_logits(model: Any, words: Tensor, codes: Tensor, order: Tensor, sizes: list[int]) -> Tensor:
    """Computes the logits of all tokens of pictures in one forward, each asked for with its group.

    Args:
        model: of `build_model`.
        words: ids of captions, int64 `[B, P]`.
        codes: int64 `[B, places]`.
        order: int64 `[B, places]`, the places in the order in which they are decided.
        sizes: sizes of the groups of that order.

    Returns:
        `[B, places, codes]`, in the order of `order`.
    """
    known = order[:, : order.shape[1] - sizes[-1]]
    inputs = [embed(model, words), embed(model, codes.gather(1, known), known)]
    inputs.append(embed(model, torch.full_like(order, -1), order))
    positions = [torch.arange(words.shape[1], device=words.device).expand_as(words), TEXT_LENGTH + known]
    hidden = model.model(
        inputs_embeds=torch.cat(inputs, 1),
        position_ids=torch.cat([*positions, TEXT_LENGTH + order], 1),
        attention_mask=training_mask(sizes, words).to(model.dtype),
        use_cache=False,
    ).last_hidden_state
    return code_logits(model, hidden[:, -order.shape[1] :])


def group_loss(model: Any, words: Tensor, codes: Tensor, order: Tensor, sizes: list[int]) -> Tensor:
    """Returns the mean cross entropy of all tokens; arguments as for `group_logits`."""
    logits = group_logits(model, words, codes, order, sizes)
    return cross_entropy(logits.float().flatten(0, 1), codes.gather(1, order).flatten())
