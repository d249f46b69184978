"""What `decode` refuses, before the first forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError, PartsongError, UnsupportedError
from partsong.samplers.text.decode import decode, decode_steps
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.rules_revising import InsertDelete
from partsong.samplers.text.runner import StockTextModel
from tests.samplers.text import plain

FULL = TextAdapter(name="full", attention="full")


class Silent(StockTextModel):
    """Fails a test that gets as far as a forward."""

    def forward(self, *args: Any, **named: Any) -> Any:
        raise AssertionError("a forward was made")


@pytest.fixture(scope="module")
def masked() -> StockTextModel:
    return Silent(plain.llama(), FULL, mask_token_id=plain.MASK)


@pytest.fixture(scope="module")
def causal() -> StockTextModel:
    return Silent(plain.llama(), TextAdapter(name="causal", attention="causal", shifted=True, noise="none"))


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1] * 100], {"max_new_tokens": 40}, "prompt 0 has 100 tokens and 40 are to follow, but the model has 128"),
        ([[1], [2, 40]], {}, "prompt 1 has token 40, but the model has 40 tokens"),
        ([], {}, "there are no prompts"),
        ([[1]], {"max_new_tokens": 0}, "there is nothing to fill"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1; use an integer of 0 or more"),
        ([[1]], {"template": [[1], [2]]}, "template has 2 rows for 1 prompts"),
        ([[1]], {"template": [[99]]}, "row 0 of the template has token 99"),
        ([[1]], {"temperature": -0.5}, "temperature=-0.5; use a number from 0"),
        ([[1]], {"block_size": 0}, "block_size=0; use a positive integer"),
        ([[1]], {"open_at": 2.0}, "open_at=2.0; use a number from 0 to 1"),
        ([[1]], {"seed": [1, 2]}, "seed lists 2 seeds for 1 prompts"),
        ([[1]], {"stop_token_ids": [77]}, "stop_token_ids has token 77"),
        ([[1]], {"rule": "renoise"}, "Renoise does not fit noise of the kind 'mask'"),
        ([[1]], {"rule": "dependency"}, "Dependency needs probe="),
        ([[1]], {"cache": "always"}, "no cache 'always'"),
        ([[1]], {"attention_mask": torch.ones(1, 1)}, "attention_mask goes with a tensor of prompts"),
    ],
)
def test_refused_of_a_masked_model(masked: StockTextModel, prompts: Any, options: Any, words: str) -> None:
    with pytest.raises(PartsongError) as caught:
        decode(masked, prompts, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 8}, "a causal model decides one token after another"),
        ({"open_blocks": 2}, "a causal model decides one token after another"),
        ({"rule": "token-editing"}, "TokenEditing revises tokens, and a causal model sees nothing after them"),
        ({"template": [[1, None, 2]]}, "a causal model sees nothing after the gap it fills"),
    ],
)
def test_refused_of_a_causal_model(causal: StockTextModel, options: Any, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        decode(causal, [[1, 2]], **options)
    assert words in str(caught.value)


def test_other_refusals(masked: StockTextModel, causal: StockTextModel) -> None:
    with pytest.raises(ArgumentError, match="every prompt needs a token"):
        decode(causal, [[]])
    with pytest.raises(ArgumentError, match="hides tokens between others"):
        decode(masked, torch.ones(1, 3, dtype=torch.int64), attention_mask=torch.tensor([[1, 0, 1]]))
    with pytest.raises(ArgumentError, match="input_ids is int"):
        decode(masked, torch.ones(3))
    with pytest.raises(ArgumentTypeError, match="rule is a Rule or its name, found int"):
        decode(masked, [[1]], rule=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="blocksize"):
        next(decode_steps(masked, [[1]], blocksize=3))
    blocks = TextAdapter(name="blocks", attention="block_causal", block_size=8)
    with pytest.raises(UnsupportedError, match="block_size=5 does not divide the model's own blocks of 8"):
        decode(Silent(plain.llama(), blocks, mask_token_id=plain.MASK), [[1]], block_size=5)
    with pytest.raises(UnsupportedError, match="Revoke masks decided tokens beside themselves"):
        decode(Silent(plain.llama(), blocks, mask_token_id=plain.MASK), [[1]], rule="revoke")
    with pytest.raises(UnsupportedError, match="InsertDelete moves tokens, and given ones between others must stay"):
        decode(masked, [[1]], rule=InsertDelete(delete_token=1, split_token=2), template=[[3, None, 4, None]])
    with pytest.raises(ArgumentError, match="mask"):
        StockTextModel(plain.llama(), FULL, mask_token_id=40)
