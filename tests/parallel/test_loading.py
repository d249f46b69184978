"""Ranks that load only what they need: equal pictures, shares from files, encoders on one rank, broken folders."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves

from partsong import ArgumentError, CfgParallel, EncodeOnce, UnsupportedError, load_pipeline, parallelize, zoo
from partsong.parallel.encode_once import SharedPrompts
from partsong.parallel.loading.weight_files import WeightFiles
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece
from tests import covering
from tests.parallel import loading_worker as worker
from tests.parallel.families import FAMILIES
from tests.pipelines.cases import wan


def _wan() -> Any:
    """A tiny pipeline; its class keeps some layers in single precision."""
    case = next(case for case in wan.HERE if case.name == "WanPipeline")
    return case.make().to(torch.float32)


@functools.cache
def mixes() -> dict[str, list[dict[str, Any]]]:
    return launch(worker.mixes, 2, 2, MIXES)


#: By default each way to hold a share of the weights, and each place for the encoders.
MIXES = worker.MIXES if covering.FULL else worker.MIXES[:3]


@pytest.mark.parametrize("mix", MIXES)
def test_equals_the_whole_pipeline(mix: str) -> None:
    for rank in mixes()[mix]:
        assert rank["error"] <= 1e-5
        assert rank["predicted"] == rank["counted"]
        assert rank["same"], "undo() reads what was left out"


def test_a_rank_reads_its_share() -> None:
    assert all(rank["held"] < 0.7 for mix in MIXES[:2] for rank in mixes()[mix])
    assert all(rank["held"] == 1.0 for rank in mixes()["encode-once cfg-parallel"])


def test_only_the_first_rank_encodes() -> None:
    for mix in MIXES:
        encodes = [rank["encodes"] for rank in mixes()[mix]]
        assert encodes == ([True, False] if "encode-once" in mix else [True, True])
    assert "the prompts of 2 ranks are encoded on the first" in mixes()["encode-once cfg-parallel"][0]["said"]


def test_a_prompt_that_cannot_be_encoded_is_refused_on_all_ranks() -> None:
    said, apart = zip(*launch(worker.failing_prompts, 2, 2), strict=True)
    assert said[0] == "the encoder is broken"
    assert "the first rank failed: RuntimeError: the encoder is broken" in said[1]
    assert max(apart) <= 1e-5


def test_what_cannot_be_sent_is_refused_on_all_ranks() -> None:
    said = launch(worker.unknown_leaves, 2, 2)
    assert all("tensors, numbers and words can be sent, not a object" in each for each in said)


def test_types_are_those_that_diffusers_chooses(tmp_path: Path) -> None:
    pipe = _wan()
    pipe.save_pretrained(tmp_path)
    for rank in launch(worker.kept_types, 2, 2, tmp_path):
        assert rank["types"]
        assert rank["kinds"] == 2, "some layers stay in single precision"
        assert rank["same"]


def test_weights_of_another_shape_are_refused_on_all_ranks(tmp_path: Path) -> None:
    pipe = _wan()
    pipe.save_pretrained(tmp_path)
    path = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("ffn.net.2.bias"))
    tensors[name] = torch.cat([tensors[name]] * 2)
    save_file(tensors, path)
    said = launch(worker.refused, 2, 2, tmp_path)
    assert all(f"weight {name} is" in each and "configuration" in each for each in said)


def test_pieces_of_files(tmp_path: Path) -> None:
    """Against slices of the whole tensor; two files with an index, as large models have."""
    matrix, vector, count = torch.randn(6, 8).bfloat16(), torch.randn(5), torch.tensor(3)
    save_file({"a": matrix, "n": count}, tmp_path / "m-00001-of-00002.safetensors")
    save_file({"b": vector}, tmp_path / "m-00002-of-00002.safetensors")
    where = {
        "a": "m-00001-of-00002.safetensors",
        "n": "m-00001-of-00002.safetensors",
        "b": "m-00002-of-00002.safetensors",
    }
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with WeightFiles(tmp_path) as files:
        assert torch.equal(files.read("a"), matrix)
        assert torch.equal(files.read("n"), count)
        assert torch.equal(files.read("a", WeightPiece(0, ((2, 3),))), matrix[2:5])
        assert torch.equal(
            files.read("a", WeightPiece(1, ((1, 2), (5, 3)))), torch.cat([matrix[:, 1:3], matrix[:, 5:8]], 1)
        )
        assert torch.equal(files.read("b", WeightPiece(0, ())), torch.zeros(5))
        assert files.most_common_dtype() in (torch.bfloat16, torch.float32)
        files.close()
        assert torch.equal(files.read("b"), vector), "files open again by themselves"


def test_a_folder_may_hold_other_weights_beside_the_usual_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    for other in ("diffusion_pytorch_model.fp16.safetensors", "original.safetensors"):
        save_file({"b": torch.ones(1)}, tmp_path / other)
    assert set(WeightFiles(tmp_path).names) == {"a"}


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="found 0"):
        WeightFiles(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ArgumentError, match="cannot be read"):
        WeightFiles(tmp_path)
    with pytest.raises(ArgumentError, match="no model"):
        load_pipeline("no-such-model", CfgParallel())


def test_encode_once_needs_a_method_to_replace() -> None:
    with pytest.raises(UnsupportedError, match="no encode_prompt"):
        parallelize(FAMILIES["SD3"].model(6, torch.float32), EncodeOnce(), CfgParallel())


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_encoders_stay_where_there_is_room_and_come_layer_by_layer_where_not(free: int) -> None:
    pipe = zoo.load("shapes")
    prompts = SharedPrompts(pipe, Axis("alone", (0,), 0), torch.device("cpu"))
    encoder = pipe.text_encoder

    def encoded() -> list[Any]:
        with torch.no_grad():
            return tree_leaves(pipe.encode_prompt("a red circle", None, None, device="cpu"))

    def num_hooked() -> int:
        return sum(bool(getattr(vars(part).get("_diffusers_hook"), "hooks", {})) for part in encoder.modules())

    before = encoded()
    prompts._place(free, 1 << 40)
    assert (num_hooked() > 0) == (free == 0)
    assert all(map(torch.equal, encoded(), before))
    prompts._detach()
    assert num_hooked() == 0
    assert all(map(torch.equal, encoded(), before))
