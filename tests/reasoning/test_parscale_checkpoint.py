"""The published layout: read from a folder written with the public names, and written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import StreamWeights
from partsong_zoo.training.parscale_checkpoint import load_model, load_streams, save
from tests.reasoning.parscale_reference import plain_logits, streams, tiny

LAYERS, WIDTH, HEADS, KV, VOCABULARY, PREFIX = 2, 32, 4, 2, 61, 48
IDS = torch.tensor([[5, 9, 60, 3, 17]])


def published_tensors(num: int, dtype: torch.dtype = torch.float32, *, tied: bool = False) -> dict[str, Tensor]:
    """Every tensor of a Qwen2 ParScale checkpoint, name by name."""
    size, draw = WIDTH // HEADS, torch.Generator().manual_seed(num)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (48, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (WIDTH, 48), f"{at}.self_attn.o_proj.weight": (WIDTH, WIDTH)}
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (heads * size, WIDTH)
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (heads * size,)
        if num > 1:
            shapes |= {f"{at}.self_attn.prefix_{name}": (num, KV, PREFIX, size) for name in "kv"}
    if num > 1:
        shapes |= {"model.aggregate_layer.0.weight": (WIDTH, num * WIDTH), "model.aggregate_layer.0.bias": (WIDTH,)}
        shapes |= {"model.aggregate_layer.2.weight": (num, WIDTH), "model.aggregate_layer.2.bias": (num,)}
    if tied:
        del shapes["lm_head.weight"]
    return {name: (torch.randn(shape, generator=draw) * 0.4).to(dtype) for name, shape in shapes.items()}


def published_config(num: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ParScaleForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_qwen2_parscale.Qwen2ParScaleForCausalLM"},
        "model_type": "qwen2_parscale",
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "parscale_n": num,
        "parscale_n_tokens": PREFIX,
        "parscale_attn_smooth": 0.01,
        **more,
    }


def write(folder: Path, num: int, tensors: dict[str, Tensor] | None = None, **more: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published_config(num, **more)))
    # Code beside the weights is there to be run by others; here it must not be.
    (folder / "modeling_qwen2_parscale.py").write_text("raise SystemExit('code of the folder was run')\n")
    save_file(tensors or published_tensors(num), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.inference_mode()
def test_a_published_folder_is_loaded_as_it_is(tmp_path: Path) -> None:
    tensors = published_tensors(4)
    model, weights = load_model(write(tmp_path / "p4", 4, tensors))
    (four,) = weights
    assert model.config.rope_parameters["rope_theta"] == 1e6 and not model.training
    assert (four.num_streams, four.prefix_length, four.smoothing) == (4, 48, 0.01)
    assert torch.equal(four.prefix_v[1], tensors["model.layers.1.self_attn.prefix_v"])
    assert torch.equal(four.state_dict()["aggregate_layer.2.bias"], tensors["model.aggregate_layer.2.bias"])
    assert torch.equal(model.state_dict()["lm_head.weight"], tensors["lm_head.weight"])
    wanted = plain_logits(model.double(), four.double(), IDS[0].tolist())
    with ParScale(model, four):
        torch.testing.assert_close(model(IDS).logits[0], wanted, rtol=0, atol=1e-4)
    for base in (False, True):
        kept: Any = load_model(tmp_path / "p4", dtype=torch.bfloat16 if base else None).model
        assert kept.dtype == (torch.bfloat16 if base else torch.float32)


@torch.inference_mode()
def test_the_aggregator_reads_features_of_all_streams_side_by_side(tmp_path: Path) -> None:
    """Feature-major, as published: input h * P + p of the first layer is feature h of stream p."""
    tensors = published_tensors(2)
    tensors["model.aggregate_layer.0.weight"] = torch.zeros(WIDTH, 2 * WIDTH)
    tensors["model.aggregate_layer.0.weight"][0, 3 * 2 + 1] = 1.0
    tensors["model.aggregate_layer.0.bias"].zero_()
    tensors["model.aggregate_layer.2.weight"] = torch.zeros(2, WIDTH)
    tensors["model.aggregate_layer.2.weight"][0, 0] = 1.0
    tensors["model.aggregate_layer.2.bias"].zero_()
    (two,) = load_model(write(tmp_path / "p2", 2, tensors)).weights
    hidden = torch.randn(2, 1, WIDTH)  # streams of one row
    share = torch.sigmoid(torch.nn.functional.silu(hidden[1, 0, 3])) * 0.99 + 0.005
    torch.testing.assert_close(two.aggregate(hidden)[0, 0], share * hidden[0, 0] + (1 - share) * hidden[1, 0])


@torch.inference_mode()
def test_round_trip_keeps_names_values_and_logits(tmp_path: Path) -> None:
    model, (four,) = load_model(write(tmp_path / "there", 4))
    save(tmp_path / "back", model, four)
    again, (same,) = load_model(tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("there", "back"))
    assert set(before) == set(after) and all(torch.equal(value, after[name]) for name, value in before.items())
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    kept = ("model_type", "architectures", "parscale_n", "parscale_n_tokens", "parscale_attn_smooth", "vocab_size")
    assert {name: written[name] for name in kept} == {name: published_config(4)[name] for name in kept}
    with ParScale(model, four), ParScale(again, same):
        assert torch.equal(model(IDS).logits, again(IDS).logits)


@torch.inference_mode()
def test_other_backbones_stay_loadable_as_base_models(tmp_path: Path) -> None:
    model = tiny("qwen3", tie_word_embeddings=True)
    save(tmp_path, model, streams(model, 2))
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert base.config.model_type == "qwen3"
    assert torch.equal(base.lm_head.weight, model.state_dict()["model.embed_tokens.weight"])
    loaded, weights = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight  # type: ignore[union-attr]
    assert loaded.dtype == torch.float64
    assert weights[0].smoothing == 0.1 and weights[0].prefix_length == 5


@torch.inference_mode()
def test_several_folders_share_one_backbone(tmp_path: Path) -> None:
    """Recycled models differ in their streams only, so P is switched without loading another backbone."""
    model, two = load_model(write(tmp_path / "p2", 2))
    four = streams(model, 4, prefix_length=PREFIX)
    save(tmp_path / "whole", model, four)
    save(tmp_path / "p4", model, four, backbone=False)
    assert len(load_file(tmp_path / "p4" / "model.safetensors")) == 2 * LAYERS + 4
    with ParScale(model, *two, load_streams(tmp_path / "p4", model)) as parscale:
        said = {num: model(IDS, past_key_values=parscale.cache(num)).logits for num in (1, 2, 4)}
    assert not torch.equal(said[2], said[4])
    whole, weights = load_model(tmp_path / "whole")
    with ParScale(whole, *weights):
        assert torch.equal(whole(IDS).logits, said[4])
    assert torch.equal(load_streams(tmp_path / "whole", model).prefix_k[0], four.prefix_k[0])
    with torch.no_grad():
        model.state_dict()["model.norm.weight"][3] += 0.1
    with pytest.raises(ArgumentError, match="another backbone"):
        load_streams(tmp_path / "whole", model)


@torch.inference_mode()
def test_one_stream_and_several_files(tmp_path: Path) -> None:
    model, weights = load_model(write(tmp_path / "p1", 1))
    assert weights == ()
    with ParScale(model) as parscale:
        assert parscale.num_streams == 1
    with pytest.raises(ArgumentError, match="one stream"):
        load_streams(tmp_path / "p1", model)
    tensors = published_tensors(2)
    folder = write(tmp_path / "p2", 2, tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (two,) = load_model(folder).weights
    assert torch.equal(two.prefix_k[1], tensors["model.layers.1.self_attn.prefix_k"])


def broken(folder: Path, how: str) -> Path:
    tensors = published_tensors(2)
    if how == "no prefix":
        del tensors["model.layers.1.self_attn.prefix_v"]
    elif how == "short prefix":
        tensors["model.layers.0.self_attn.prefix_k"] = torch.zeros(2, KV, 7, WIDTH // HEADS)
    elif how == "no norm":
        del tensors["model.norm.weight"]
    elif how == "unknown":
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    elif how == "wide":
        tensors["model.norm.weight"] = torch.ones(WIDTH + 1)
    write(folder, 2, tensors, **({"model_type": "gpt2"} if how == "family" else {}))
    if how == "no file":
        (folder / "model.safetensors").unlink()
    elif how == "half a file":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif how == "outside":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../p2/model.safetensors"}}')
    elif how == "no json":
        (folder / "config.json").write_text("{")
    elif how == "no streams":
        (folder / "config.json").write_text('{"model_type": "qwen2"}')
    elif how == "no config":
        (folder / "config.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no prefix", r"no model.layers.1.self_attn.prefix_v \(1 of 8 names"),
        ("short prefix", r"shape \(2, 2, 7, 8\) in the checkpoint, \(2, 2, 48, 8\)"),
        ("no norm", "lacks 1 tensors of the backbone, model.norm.weight"),
        ("unknown", "unknown 1 tensors"),
        ("wide", "does not fit"),
        ("family", "'gpt2'"),
        ("no file", "no .*model.safetensors"),
        ("half a file", "not a whole safetensors file"),
        ("outside", "hold their weights"),
        ("no json", "config.json cannot be read"),
        ("no streams", "no parscale_n"),
        ("no config", "no .*config.json"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        load_model(broken(tmp_path / "p2", how))


def test_mistaken_arguments_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "p2", 2)
    with pytest.raises(ArgumentTypeError, match="int8"):
        load_model(folder, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="'qwen2', the model is 'llama'"):
        load_streams(folder, tiny("llama"))
    model = tiny("llama")
    with pytest.raises(ArgumentError, match="other sizes"):
        save(tmp_path / "out", model, StreamWeights.new(tiny("llama", hidden_size=64), 2))
    with pytest.raises(ArgumentError, match="one stream as the base model"):
        save(tmp_path / "out", model, StreamWeights.new(model, 1))
    assert not (tmp_path / "out").exists()
