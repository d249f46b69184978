"""Names a language model's cache by its signature, and where that says nothing by the results of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from partsong.parallel.text.cache_names import CACHE_NAMES, cache_name, given_cache, result_name, returned_cache
from tests.tiny_models.text import causal_model


class Older(nn.Module):
    def forward(self, ids: Any, past_key_values: Any = None) -> None:
        """Takes a cache by the older name."""


class Newer(nn.Module):
    def forward(self, ids: Any, cache: Any = None, **more: Any) -> None:
        """Takes a cache by the newer name."""


class Wrapper(nn.Module):
    def forward(self, *given: Any, **named: Any) -> None:
        """Says nothing about its arguments."""


def test_a_signature_says_the_name() -> None:
    assert (cache_name(Older()), cache_name(Newer())) == ("past_key_values", "cache")


@torch.no_grad()
def test_a_model_keeps_its_keys_in_the_cache_that_it_is_given_by_that_name() -> None:
    model, cache, ids = causal_model("llama"), DynamicCache(), torch.tensor([[1, 2, 3]])
    for each in (model, model.base_model, Wrapper()):
        assert cache_name(each) == cache_name(model)
    out = model(ids, **{cache_name(model): cache})
    assert cache.get_seq_length() == 3
    assert returned_cache(out) is cache


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_callers_may_give_it_by_either_name(name: str) -> None:
    cache = DynamicCache()  # an empty one is false
    assert given_cache({name: cache, "use_cache": True}) is cache
    assert given_cache(dict.fromkeys(CACHE_NAMES)) is None


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_results_have_it_by_either_name(name: str) -> None:
    result = SimpleNamespace(**{name: None})
    assert (result_name(result), returned_cache(result)) == (name, None)
