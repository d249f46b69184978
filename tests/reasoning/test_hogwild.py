"""Rotated queries give what rotated keys give, in every step of a writing, and no key is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from partsong.errors import UnsupportedError
from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.reasoning import Parameters
from partsong.reasoning.hogwild import workers as hogwild_workers
from partsong.reasoning.hogwild.attention import Feed, forward
from partsong.reasoning.hogwild.cache import PAGE, SLAB, BlockStore
from partsong.reasoning.hogwild.rotary import rotary_of
from partsong.reasoning.hogwild.workers import Writing
from partsong.reasoning.local.model import FAMILIES, LocalModel
from partsong.seeds import derive
from tests import covering
from tests.reasoning.hogwild_twin import EOS, Twin, tiny, tokenizer, work

#: One forward as it was asked for: (numbers of the blocks in view, tokens, whether logits were asked for).
Asked = list[tuple[list[int], list[int], bool]]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Asked, torch.Tensor]]:
    """All forwards of the writings of a test, with the logits they gave."""
    found: list[tuple[Asked, torch.Tensor]] = []

    def noted(model: Any, rotary: Any, store: Any, feeds: Sequence[Feed]) -> torch.Tensor:
        asked = [([block.number for block in feed.view], list(feed.tokens), feed.asked) for feed in feeds]
        found.append((asked, forward(model, rotary, store, feeds)))
        return found[-1][1]

    monkeypatch.setattr(hogwild_workers, "forward", noted)
    return found


def written(module: PreTrainedModel, *args: Any, **more: Any) -> Writing:
    model = LocalModel(module)
    writing = Writing(model, tokenizer(), work(*args, **more))
    while not writing.over:
        writing.turn()
    model.close()
    return writing


def worst(module: PreTrainedModel, forwards: list[tuple[Asked, torch.Tensor]], *, exact: bool) -> float:
    """The largest difference of any step's logits from the twin's, relative to the largest logit of the step."""
    twin, found = Twin(module, exact=exact), 0.0
    for asked, logits in forwards:
        wanted = twin.read([(view, tokens) for view, tokens, _ in asked])
        wanted = wanted[torch.tensor([ask for *_, ask in asked])]
        if len(wanted):
            found = max(found, float((logits - wanted).abs().max() / wanted.abs().max()))
    return found


PROMPT = "What is three and four? " * 7
#: Every family, layout and number of workers up to three once; the others show the same.
DEFAULT = [("llama", 1, "combined"), ("qwen2", 2, "combined"), ("qwen3", 3, "combined")]
DEFAULT += [("llama", 2, layout) for layout in ("contiguous", "interleaved")]
CASES = [(family, workers, "combined") for family in ("llama", "qwen2", "qwen3") for workers in (1, 2, 3, 4)]
CASES += [("llama", workers, layout) for workers in (2, 4) for layout in ("contiguous", "interleaved")]
CASES = [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.full) for case in CASES]


@pytest.mark.parametrize(("family", "workers", "layout"), CASES)
def test_every_step_equals_turned_keys(
    family: str, workers: int, layout: str, forwards: list[tuple[Asked, torch.Tensor]]
) -> None:
    """Steps of all lengths, questions, workers that end before others, and the answer at the end."""
    module = tiny(family)
    writing = written(module, PROMPT, workers, layout)
    lengths = {block.length for block in writing.store.blocks}
    assert len(forwards) > 30 and len(lengths) > workers and writing.store.num_tokens > 170 + 20 * workers
    assert worst(module, forwards, exact=True) < 1e-10


def test_views_over_several_slabs_of_memory(forwards: list[tuple[Asked, torch.Tensor]]) -> None:
    module = tiny("llama")
    writing = written(module, PROMPT * 7, 3, parameters=Parameters(max_tokens=12))
    assert len(writing.store.keys) == 2
    assert worst(module, forwards, exact=True) < 1e-10


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2", "qwen3"))]
)
def test_float32_equals_the_stock_model(family: str, forwards: list[tuple[Asked, torch.Tensor]]) -> None:
    module = tiny(family, torch.float32)
    written(module, PROMPT, 3)
    assert worst(module, forwards, exact=False) < 1e-5


PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHERS = [(family, {}) for family in FAMILIES if family not in ("llama", "qwen2", "qwen3", "gpt2")]
OTHERS += [("phi3", {"rope_parameters": PARTLY}), ("gpt_neox", {"rope_parameters": PARTLY})]
OTHERS += [("llama", {"rope_parameters": scaled}) for scaled in (YARN, LINEAR, LLAMA3)]
OTHERS += [("qwen3", {"num_key_value_heads": 1}), ("llama", {"head_dim": 16})]


@pytest.mark.parametrize(("family", "more"), OTHERS if covering.FULL else [*OTHERS[:-7:2], *OTHERS[-7:]])
def test_other_rotary_families(family: str, more: dict[str, Any], forwards: list[tuple[Asked, torch.Tensor]]) -> None:
    """Among them: layers without positions, dims that are not turned, scaled tables, one key head, wide heads."""
    module = tiny(family, **more)
    written(module, PROMPT, 2, parameters=Parameters(max_tokens=16))
    assert worst(module, forwards, exact=True) < 1e-10


def test_a_worker_that_is_alone_writes_what_plain_generation_does() -> None:
    module = tiny("llama")
    asked = Parameters(max_tokens=30, temperature=0.8, top_p=0.9)
    found = written(module, "What is it?", 1, parameters=asked, answer_tokens=0, seed=5).completion(0)
    ids = tokenizer()("What is it?").input_ids
    begin = len(ids)
    with torch.inference_mode():
        while len(ids) < begin + 30 and EOS not in ids[begin:]:
            how = TokenDraw(asked.temperature, asked.top_p, derive(5, "hogwild", 0), len(ids) - begin)
            ids += draw(module(torch.tensor([ids])).logits[:, -1], [how])
    assert found is not None and found.usage.completion == len(ids) - begin
    assert found.text == tokenizer().decode(ids[begin:], skip_special_tokens=True)
    assert (found.usage.prompt, found.usage.cached) == (begin, 0)


class Made(TorchDispatchMode):
    """Notes the largest tensor that comes into being, by its own memory."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.numel() * x.itemsize)
        return out


@torch.inference_mode()
def test_no_key_is_copied_or_moved_in_a_step() -> None:
    # Wide heads as real models have them: a key is much larger than its scores.
    model = LocalModel(tiny("llama", head_dim=64))
    rotary, store = rotary_of(model), BlockStore(model)
    prompt, *own = (store.block() for _ in range(4))
    many = torch.randint(2, 100, (SLAB * PAGE + 300,)).tolist()
    for first in range(0, len(many), 100):
        forward(model, rotary, store, [Feed([prompt], many[first : first + 100], asked=False)])
    views = [[prompt, *(other for other in own if other is not mine), mine] for mine in own]
    assert len(store.keys) == 2
    before = [(x, x.data_ptr(), x.clone()) for x in (*store.keys, *store.values)]
    taken = [list(block.pages) for block in store.blocks]
    with Made() as made:
        for step in range(PAGE + 3):
            forward(model, rotary, store, [Feed(view, [step + 5]) for view in views])
    # One worker's view of the keys of one layer, the least that somebody who copies has to make.
    view = store.num_tokens * model.kv_heads * model.head_dim * 8
    assert 0 < made.largest < view / 3
    for (x, where, kept), now in zip(before, (*store.keys, *store.values), strict=True):
        written = kept != 0
        assert now is x and x.data_ptr() == where and torch.equal(x[written], kept[written])
    assert all(block.pages[: len(old)] == old for block, old in zip(store.blocks, taken, strict=True))
    model.close()


def test_memory_is_the_prompt_once_and_each_workers_own_tokens() -> None:
    shared: set[int] = set()
    for workers in (2, 4, 8) if covering.FULL else (2, 4):
        writing = written(tiny("llama"), PROMPT, workers, answer_tokens=0, ends=frozenset())
        store, model = writing.store, writing.model
        # What a worker drew last was never read.
        own = sum(writer.inserted + writer.drawn - 1 for writer in writing.writers)
        shared.add(store.num_tokens - own)
        assert store.num_tokens - own == writing.prefill
        assert len(store.pages) == sum(-(-block.length // PAGE) for block in store.blocks)
        taken = sum(x.numel() * x.itemsize for x in (*store.keys, *store.values))
        assert taken == -(-len(store.pages) // SLAB) * SLAB * PAGE * model.bytes_per_token
    assert len(shared) == 1
    block = store.block()
    store.extend(block, PAGE)
    assert len(block.pages) == 1, "a full page needs no next one yet"


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("gpt2", {}, "gpt2 has another kind of position"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_positions_of_another_kind_are_refused(family: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        written(tiny(family, **more), PROMPT, 2)
