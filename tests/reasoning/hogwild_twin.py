"""Workers in the plainest way: a stock model, and for every worker, layer and step all keys it sees, turned and copied.

Also the tiny models and the tokenizer of the tests.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from partsong.reasoning import Parameters
from partsong.reasoning.hogwild.layouts import LAYOUTS
from partsong.reasoning.hogwild.prompts import HogwildPrompts, worker_names
from partsong.reasoning.hogwild.workers import WorkerText
from tests.tiny_models.text import causal_model, letter_tokenizer

EOS = 1
#: Ends of paragraphs, a tenth of the vocabulary: a random model writes one every ten tokens.
PARAGRAPHS = ["." * count + "\n\n" for count in range(1, 13)]
WORDS = ["<pad>", "<eos>", *PARAGRAPHS, *map(chr, range(32, 127)), "\n", "\\boxed{7}"]
VOCABULARY = len(WORDS)

SHORT = HogwildPrompts(
    history="#H#", others="#others#", own="#own#", label="{name}{step}:", probe="(Again?)", finish="Thus \\boxed{{"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, but for ends of paragraphs and the answer."""
    return letter_tokenizer(WORDS, Regex(r"\.+\n\n|\\boxed\{7\}|[\s\S]"))


def tiny(family: str = "llama", dtype: torch.dtype = torch.float64, **more: Any) -> PreTrainedModel:
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "initializer_range": 0.2}
    return causal_model(family, **sizes | more).to(dtype)


def work(prompt: str, num_workers: int, layout: str = "combined", **more: Any) -> WorkerText:
    asked: dict[str, Any] = {
        "prompt": tokenizer()(prompt).input_ids,
        "names": worker_names(num_workers),
        "layout": LAYOUTS[layout],
        "texts": SHORT,
        "parameters": Parameters(max_tokens=40),
        "seed": 0,
        "probe_every": 20,
        "answer_tokens": 4,
        "ends": frozenset({EOS}),
        "concludes": lambda text, ended: False,
    }
    return WorkerText(**{**asked, **more})


class ExactRotary(nn.Module):
    """A rotary embedding with tables in float64; the stock one has them in float32 whatever the model's dtype."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.inv_freq = stock.inv_freq
        # As the stock one rounds it.
        self.scaling = float(torch.tensor(stock.attention_scaling, dtype=torch.float32))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotary_holder(module: Any) -> Any:
    return next(each for each in module.modules() if hasattr(each, "rotary_emb"))


def turned(keys: Tensor, shift: Tensor, frequencies: Tensor) -> Tensor:
    """Keys `[kv_heads, n, head_dim]` at positions larger by `shift` `[n]`: pairs of elements as complex numbers."""
    half = len(frequencies)
    numbers = torch.complex(keys[..., :half].double(), keys[..., half : 2 * half].double())
    numbers = numbers * torch.polar(torch.ones((), dtype=torch.float64), shift[:, None].double() * frequencies.double())
    return torch.cat((numbers.real, numbers.imag, keys[..., 2 * half :].double()), dim=-1).to(keys.dtype)


class Written:
    """A block: by layer, keys as the model made them, `[kv_heads, n, head_dim]`, values; and where they were made."""

    def __init__(self, layers: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]
        self.positions: list[int] = []


class ViewCache(DynamicCache):
    """Gives each row of a forward the whole of what it sees, padded on the left."""

    def __init__(
        self, rows: Sequence[tuple[Sequence[Written], int]], frequencies: Tensor, turns: Sequence[bool]
    ) -> None:
        super().__init__()
        self.rows, self.frequencies, self.turns = rows, frequencies, turns

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        for row, (view, count) in enumerate(self.rows):
            view[-1].keys[layer_idx].append(key_states[row, :, -count:])
            view[-1].values[layer_idx].append(value_states[row, :, -count:])
        views = [self._seen(view, layer_idx) for view, _ in self.rows]
        longest = max(keys.shape[1] for keys, _ in views)
        return tuple(
            torch.stack([nn.functional.pad(one[which], (0, 0, longest - one[which].shape[1], 0)) for one in views])
            for which in (0, 1)
        )

    def _seen(self, view: Sequence[Written], layer: int) -> tuple[Tensor, Tensor]:
        keys, values, position = list[Tensor](), list[Tensor](), 0
        for block in view:
            if not block.positions:
                continue
            made = torch.cat(block.keys[layer], dim=1)
            now = torch.arange(position, position + made.shape[1])
            shift = now - torch.tensor(block.positions)
            keys.append(turned(made, shift, self.frequencies) if self.turns[layer] else made)
            values.append(torch.cat(block.values[layer], dim=1))
            position += made.shape[1]
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)


class Twin:
    """Reads the feeds of a step in one forward of the stock model, a row each.

    Args:
        module: the model; it stays as it is.
        exact: whether its rotary tables are float64.
    """

    def __init__(self, module: PreTrainedModel, *, exact: bool) -> None:
        self.module: Any = copy.deepcopy(module)
        config: Any = module.config
        holder = rotary_holder(self.module)
        self.frequencies = holder.rotary_emb.inv_freq
        if exact:
            holder.rotary_emb = ExactRotary(holder.rotary_emb)
        self.layers = config.num_hidden_layers
        self.turns = [bool(x) for x in getattr(config, "no_rope_layers", None) or [1] * self.layers]
        self.blocks: dict[int, Written] = {}

    @torch.inference_mode()
    def read(self, feeds: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        """Logits behind the last token of each (blocks in view, tokens)."""
        rows = []
        for view, tokens in feeds:
            rows.append(([self.blocks.setdefault(n, Written(self.layers)) for n in view], len(tokens)))
        # All blocks grow first: tokens of the same step are seen.
        old = {id(view[-1]): len(view[-1].positions) for view, _ in rows}
        new = {id(view[-1]): count for view, count in rows}
        sizes = [sum(len(b.positions) + new.get(id(b), 0) for b in view) for view, _ in rows]
        assert len(old) == len(rows)
        width, longest = max(count for _, count in rows), max(sizes)
        ids, places = torch.zeros(2, len(rows), width, dtype=torch.int64)
        hidden = torch.ones(len(rows), 1, width, longest, dtype=torch.bool)
        for row, ((_, count), size, (_, tokens)) in enumerate(zip(rows, sizes, feeds, strict=True)):
            ids[row, -count:], places[row, -count:] = torch.tensor(tokens), torch.arange(size - count, size)
            for back in range(count):
                hidden[row, 0, width - 1 - back, longest - size : longest - back] = False
            # What pads the input sees something, so that no softmax is empty.
            hidden[row, 0, : width - count, longest - size] = False
        for (view, count), size in zip(rows, sizes, strict=True):
            view[-1].positions += range(size - count, size)
        mask = torch.zeros(hidden.shape, dtype=self.module.dtype).masked_fill(
            hidden, torch.finfo(self.module.dtype).min
        )
        cache = ViewCache(rows, self.frequencies, self.turns)
        out = self.module(input_ids=ids, position_ids=places, attention_mask=mask, past_key_values=cache)
        return out.logits[:, -1]
