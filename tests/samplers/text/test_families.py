"""Which row a configuration belongs to, and which error comes where that is open."""

from __future__ import annotations

import pytest

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.samplers.text.families import ADAPTERS, adapter_of
from partsong.samplers.text.model import TextAdapter


@pytest.mark.parametrize(
    ("model_type", "architecture", "name"),
    [
        ("llada", "LLaDAModelLM", "llada"),
        ("llada", "LLaDAMoEModelLM", "llada-moe"),
        ("lladamoe", "LLaDAMoEModel", "llada-moe"),
        ("llada2_moe", "LLaDA2MoeModelLM", "llada2"),
        ("llada21_moe", "LLaDA2MoeModelLM", "llada2"),
        ("Dream", "DreamModel", "dream"),
        ("sdar", "SDARForCausalLM", "sdar"),
        ("sdar_moe", "SDARMoeForCausalLM", "sdar"),
        ("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM", "fast-dllm-v2"),
        ("bert", "BertForMaskedLM", "bert"),
        ("modernbert", "ModernBertForMaskedLM", "modernbert"),
        ("diffusion_gemma", "DiffusionGemmaForBlockDiffusion", "diffusion-gemma"),
        ("qwen3", "Qwen3ForCausalLM", "causal"),
    ],
)
def test_recognised(model_type: str, architecture: str, name: str) -> None:
    assert adapter_of({"model_type": model_type, "architectures": [architecture]}) is ADAPTERS[name]


def test_the_rows_are_what_the_papers_say() -> None:
    shifted = {name for name, row in ADAPTERS.items() if row.shifted}
    assert shifted == {"dream", "fast-dllm-v2", "causal"}
    blocks = {name: row.block_size for name, row in ADAPTERS.items() if row.attention == "block_causal"}
    assert blocks == {"llada2": 32, "sdar": 4, "fast-dllm-v2": 32, "bd3": 4, "diffusion-gemma": 256}
    after_prompt = {name for name, row in ADAPTERS.items() if row.block_origin == "prompt"}
    assert after_prompt == {"diffusion-gemma"} == {name for name, row in ADAPTERS.items() if row.needs_keys}
    assert {name for name, row in ADAPTERS.items() if not row.keeps_keys} == {"bert", "modernbert"}
    assert all(name == row.name for name, row in ADAPTERS.items())


def test_the_configuration_says_the_block_size() -> None:
    config = {"model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 16}
    assert adapter_of(config).block_size == 16
    assert adapter_of({"model_type": "diffusion_gemma", "canvas_length": 8}).block_size == 8
    assert adapter_of({"model_type": "llama", "block_size": 6}, "bd3").block_size == 6
    with pytest.raises(ArgumentError, match="bd_size='many'; use a positive integer"):
        adapter_of(config | {"bd_size": "many"})


def test_a_name_or_a_row_goes_before_the_configuration() -> None:
    config = {"model_type": "llama", "mask_token_id": 5, "partsong_adapter": "llada"}
    own = TextAdapter(name="own", attention="full", shifted=True)
    assert adapter_of(config).name == "llada"
    assert adapter_of(config, "dream").name == "dream"
    assert adapter_of(config, own) is own


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "rwkv"},
        {"model_type": "llama", "mask_token_id": 5},
        {"model_type": "llada"},
        {"model_type": "Dream", "architectures": ["DreamForCausalLM"]},
    ],
)
def test_what_is_open_is_asked_with_all_names(config: dict) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        adapter_of(config)
    assert all(name in str(refusal.value) for name in ADAPTERS)


def test_names_nobody_has() -> None:
    with pytest.raises(ArgumentError, match="there is no adapter 'lada'; there are bd3, bert"):
        adapter_of({}, "lada")
    with pytest.raises(ArgumentTypeError, match="found int"):
        adapter_of({}, 3)  # pyright: ignore[reportArgumentType]
