"""Heads with random weights for the tiny random Llama: masks see another model than tokens do, and guess badly."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from partsong.kernels.speculation.draft import DraftTree
from partsong.reasoning.local.batch import Batch
from partsong.reasoning.local.batch_feed import BatchRow
from partsong.reasoning.local.mask_head import MaskHead, save_head
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_tree import PrefixTree
from tests.reasoning.local_models import llama, tokenizer


def random_head(model: PreTrainedModel, seed: int = 0, **more: Any) -> MaskHead:
    torch.manual_seed(seed)
    head = MaskHead.of(model, tokenizer().get_vocab(), **{"num_masks": 3, "rank": 2, "alpha": 2.0, **more})
    for parameter in head.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return head


@functools.cache
def head_folder(**more: Any) -> Path:
    """A folder with a random head for `llama()`, which lasts as long as the tests do."""
    folder = Path(tempfile.mkdtemp(prefix="partsong-head-"))
    save_head(random_head(llama(), **more), folder)
    return folder


class Rows:
    """Feeds a `LocalModel` by hand: a prompt, then rows that go on from it."""

    def __init__(self, module: PreTrainedModel, head: MaskHead | None) -> None:
        self.model = LocalModel(module)
        if head is not None:
            self.model.take_masks(head.masks.to(self.model.dtype))
        self.batch: Batch[BatchRow] = Batch(self.model)
        self.tree = PrefixTree(self.model.room_for, 1000, self.batch.note_cut)

    @torch.no_grad()
    def read(self, tokens: list[int], masks: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits after a prompt, and the states of its last token and of masks behind it; a row goes on from it."""
        leaf = self.tree.place(tokens)[0]
        leaf.needs_logits = True
        chunks = [(node, len(node.tokens) - node.done) for node in leaf.chain()]
        output = self.batch.forward(chunks, layers=(-1,), masks=masks)
        for node, count in chunks:
            node.done += count
        end = output.ends[-1]
        assert end is not None
        self.batch.join(BatchRow(leaf, 0))
        return end, output.ahead[-1][:, 0]

    @torch.no_grad()
    def verify(self, next_tokens: list[int], drafts: list[DraftTree]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The logits of all nodes, and each row's states."""
        for row, token in zip(self.batch.rows, next_tokens, strict=True):
            row.next_token = token
        output = self.batch.forward([], drafts, layers=(-1,))
        return output.logits, [states[:, 0] for states in output.states]
