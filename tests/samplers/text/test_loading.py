"""Public checkpoints, re-keyed: equal to the published architecture; every refusal, before any forward."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.samplers.text import weights as reading
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.model import TextAdapter, TextModel
from partsong.samplers.text.runner import StockTextModel
from tests.samplers.text.checkpoints import (
    CHECKPOINTS,
    DREAM,
    LLADA,
    LLADA2,
    LLADA_MOE,
    SDAR,
    VOCAB,
    llada2_shapes,
    llada_shapes,
    random_weights,
    write,
)

LENGTH = 11


def tokens_and_sight(row: TextAdapter) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    place = torch.arange(LENGTH) // (row.block_size or LENGTH)
    return tokens, (place[:, None] >= place).expand(2, -1, -1)


def logits_of(model: TextModel, tokens: Tensor, visible: Tensor) -> Tensor:
    order = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model.forward(tokens, order, order, visible, None) @ model.head.weight.T * model.head.logit_scale


def tiny_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_equals_the_published_architecture(tmp_path: Path, name: str) -> None:
    config, shapes, published, adapter = CHECKPOINTS[name]
    weights = random_weights(shapes(config))
    # The code a repository brings along would be seen to run.
    folder = write(tmp_path / "checkpoint", config, weights, shards=1 if "variant" in name else 3)
    for entry in (config.get("auto_map") or {}).values():
        (folder / f"{entry.split('.')[0]}.py").write_text("raise SystemExit('remote code ran')")
    model = load_text_model(folder, dtype=torch.float64)
    assert isinstance(model, StockTextModel)
    tokens, visible = tokens_and_sight(model.adapter)
    expected = published(weights, config, tokens, visible)
    logits = logits_of(model, tokens, visible)
    assert expected.std() > 0.1
    # The published routers compute in float32, where two orders of summation differ.
    tolerance = 1e-6 if "num_experts" in config else 1e-10
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()
    assert (model.adapter.name, model.mask_token_id, model.vocab_size) == (adapter, config["mask_token_id"], VOCAB)
    assert model.eos_token_ids == (config["eos_token_id"],)
    assert not any(p.requires_grad for p in model.module.parameters())


def test_files_are_closed_now_and_then_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped of a file is this process's memory until the file is closed; values stay."""
    folder, opened = write(tmp_path / "checkpoint", LLADA2, random_weights(llada2_shapes(LLADA2))), list[Path]()
    whole: Any = load_text_model(folder)

    def opening(file: Path, *args: Any, **options: Any) -> Any:
        opened.append(file)
        return safe_open(file, *args, **options)

    monkeypatch.setattr(reading, "BYTES_UNTIL_CLOSED", 1)
    monkeypatch.setattr(reading, "safe_open", opening)
    again: Any = load_text_model(folder)
    assert len(opened) > len(again.module.state_dict())
    pairs = zip(whole.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_rekeyed_model_saved_by_transformers_is_read_back(tmp_path: Path) -> None:
    config, shapes, _, _ = CHECKPOINTS["llada-variant"]
    first = load_text_model(write(tmp_path / "public", config, random_weights(shapes(config))))
    assert isinstance(first, StockTextModel)
    first.module.save_pretrained(tmp_path / "stock")
    second = load_text_model(tmp_path / "stock")
    tokens, visible = tokens_and_sight(first.adapter)
    assert second.adapter == first.adapter and second.mask_token_id == 39 and second.eos_token_ids == (5,)
    assert torch.equal(logits_of(first, tokens, visible), logits_of(second, tokens, visible))


def test_dtype_mask_and_end_tokens(tmp_path: Path) -> None:
    weights = random_weights(llada_shapes(LLADA))
    folder = write(tmp_path, LLADA, weights)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, 100000]}))
    model = load_text_model(folder, mask_token_id=3)
    assert model.head.weight.dtype is torch.float32 and model.mask_token_id == 3
    assert model.eos_token_ids == (5, 9)
    assert load_text_model(folder, dtype=torch.bfloat16).head.weight.dtype is torch.bfloat16
    own = TextAdapter(name="mine", attention="block_causal", block_size=2)
    assert load_text_model(folder, adapter=own).adapter is own
    assert load_text_model(folder, adapter="mdlm").adapter.name == "mdlm"


def test_stock_checkpoints(tmp_path: Path) -> None:
    llama = tiny_llama()
    llama.save_pretrained(tmp_path / "llama")
    model = load_text_model(tmp_path / "llama")
    assert (model.adapter.name, model.mask_token_id) == ("causal", None)
    tokens = torch.arange(6)[None]
    sight = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    torch.testing.assert_close(logits_of(model, tokens, sight), llama(tokens).logits.detach())
    bert = BertForMaskedLM(
        BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    )
    bert.save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    (tmp_path / "bert" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    encoder = load_text_model(tmp_path / "bert")
    assert (encoder.adapter.name, encoder.mask_token_id, encoder.key_store(1, 4)) == ("bert", 4, None)


def wrong_shape(weights: dict[str, Tensor]) -> None:
    weights["model.transformer.blocks.1.ff_proj.weight"] = torch.zeros(3, 24)


def missing(weights: dict[str, Tensor]) -> None:
    del weights["model.transformer.blocks.1.ff_norm.weight"]


def unexpected(weights: dict[str, Tensor]) -> None:
    weights["model.transformer.wpe.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (missing, r"1 missing \(model.transformer.blocks.1.ff_norm.weight\), 0 unexpected"),
        (unexpected, r"0 missing .*1 unexpected \(model.transformer.wpe.weight\)"),
        (wrong_shape, r"blocks.1.ff_proj.weight is \[3, 24\] .*makes it \[20, 24\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, spoil, says: str) -> None:
    weights = random_weights(llada_shapes(LLADA))
    spoil(weights)
    with pytest.raises(ArgumentError, match=says):
        load_text_model(write(tmp_path, LLADA, weights))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LLADA | {"alibi": True}, "alibi = True"),
        (LLADA | {"block_type": "sequential"}, "block_type = 'sequential'"),
        (LLADA | {"input_emb_norm": True}, "input_emb_norm = True"),
        (LLADA | {"gate_temperature": 2.0}, "gate_temperature"),
        (LLADA | {"quantization_config": {"bits": 4}}, "quantised"),
        (LLADA2 | {"score_function": "softmax"}, "score_function = 'softmax'"),
        (LLADA2 | {"use_bias": True}, "use_bias = True"),
        (LLADA2 | {"num_shared_experts": 0}, "num_shared_experts = 0"),
        (LLADA2 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scaled rotary"),
        (LLADA_MOE | {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (LLADA_MOE | {"moe_layer_freq": [0, 1]}, "dense layers"),
        (DREAM | {"use_sliding_window": True}, "use_sliding_window = True"),
        (DREAM | {"architectures": ["DreamForCausalLM"]}, "Name it with adapter=.*fast-dllm-v2.*sdar"),
        (SDAR | {"attention_bias": True}, "attention_bias = True"),
        ({"model_type": "llama", "mask_token_id": 3}, "masked or a block diffusion model"),
        ({"model_type": "mamba"}, "no family here"),
    ],
)
def test_what_the_stock_module_does_not_compute_is_refused(tmp_path: Path, config: dict, says: str) -> None:
    """No weights are there: the refusal comes before any is looked for."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=says):
        load_text_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({k: v for k, v in LLADA.items() if k != "rope_theta"}, "needs 'rope_theta'"),
        (LLADA2 | {"rotary_dim": 8}, "only one of them can be right"),
        (LLADA | {"mask_token_id": "<mask>"}, "mask_token_id='<mask>'; use an integer of 0 or more"),
        (SDAR | {"block_size": 0}, "block_size=0; use a positive integer"),
    ],
)
def test_configurations_that_contradict_themselves(tmp_path: Path, config: dict, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArgumentError, match=says):
        load_text_model(tmp_path)


def test_folders_without_readable_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLADA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ArgumentError, match=r"pytorch_model.bin is a pickle, which is never read"):
        load_text_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ArgumentError, match="no such file beside it"):
        load_text_model(tmp_path)
    index.write_text("[]")
    with pytest.raises(ArgumentError, match="not an index"):
        load_text_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ArgumentError, match="not a safetensors file"):
        load_text_model(tmp_path)


def test_sources_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="not a folder here, not one of lists-ar, .*, and not a hub id"):
        load_text_model("./nowhere/at/all")
    with pytest.raises(ArgumentError, match="it has no config.json"):
        load_text_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArgumentError, match="cannot be read as a model configuration"):
        load_text_model(tmp_path)
    with pytest.raises(ArgumentTypeError, match="found int"):
        load_text_model(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="a model object is used as it is"):
        load_text_model(tiny_llama(), dtype=torch.float64)


def test_a_hub_id_is_fetched_without_code_and_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, LLADA, random_weights(llada_shapes(LLADA)))
    files = ["config.json", "model.safetensors", "modeling_llada.py", "pytorch_model.bin", "tokenizer.json"]
    files += ["consolidated.safetensors", "original/model.safetensors"]
    fetched: list[str] = []

    def download(repository: str, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool) -> str:
        assert local_files_only
        if repository != "somebody/llada":
            raise LocalEntryNotFoundError("nothing cached")
        fitting = [f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in allow_patterns)]
        fetched.extend(f for f in fitting if not any(fnmatch.fnmatch(f, pattern) for pattern in ignore_patterns))
        return str(folder)

    def model_info(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_text_model("somebody/llada").adapter.name == "llada"
    assert fetched == ["config.json", "model.safetensors", "tokenizer.json"]
    with pytest.raises(ArgumentError, match=r"not reachable \(no network\) and somebody/else is not in"):
        load_text_model("somebody/else")


def test_the_mask_token_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLADA | {"mask_token_id": 126336}))
    with pytest.raises(ArgumentError, match=f"126336 is outside the vocabulary of {VOCAB}"):
        load_text_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 9, "mask_token_id": 9}))
    with pytest.raises(ArgumentError, match="9 is outside the vocabulary of 9"):
        load_text_model(tmp_path, adapter="mdlm")


def test_mask_tokens_of_a_model_object() -> None:
    with pytest.raises(ArgumentError, match="needs a mask token"):
        load_text_model(tiny_llama(), adapter="mdlm")
    with pytest.raises(ArgumentError, match=f"40 is outside the vocabulary of {VOCAB}"):
        load_text_model(tiny_llama(), adapter="mdlm", mask_token_id=40)
    assert load_text_model(tiny_llama(), adapter="mdlm", mask_token_id=39).mask_token_id == 39
