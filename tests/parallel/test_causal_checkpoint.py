"""Causal Wan checkpoints load as their repositories store them, and stream as the causal model of the same weights."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2Transformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from partsong import CascadePipeline
from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.parallel import Mesh, parallelize
from partsong.samplers import generate, load_causal_checkpoint
from tests.parallel.dual_worker import call, exact, pipeline
from tests.parallel.timestep_worker import FRAMES

#: Names of diffusers and of Wan's own repository, as patterns.
NAMES = (
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"attn1\.", "self_attn."),
    (r"attn2\.", "cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"(blocks\.\d+\.)norm2\.", r"\1norm3."),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"(blocks\.\d+\.)scale_shift_table", r"\1modulation"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
)


def weights() -> dict[str, Tensor]:
    """The weights of a tiny causal model, under the names of diffusers."""
    return dict(exact(SkyReelsV2Transformer3DModel).state_dict())


def as_wan(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The same under the names of Wan's repository."""
    renamed = {}
    for name, value in state.items():
        for ours, theirs in NAMES:
            name = re.sub(ours, theirs, name)
        renamed[prefix + name] = value
    return renamed


def other_pipeline() -> Any:
    """A pipeline of Wan with other weights."""
    pipe = pipeline()
    for weight in pipe.transformer.parameters():
        weight.data.zero_()
    return pipe


def saved(path: Path, layout: str) -> Path:
    """The weights in a file, as one repository or another stores them."""
    state, zeros = weights(), {name: torch.zeros_like(value) for name, value in weights().items()}
    if layout == "Self-Forcing":  # FSDP around the model, the averaged weights beside the others
        both = {"generator": as_wan(zeros, "model."), "generator_ema": as_wan(state, "model._fsdp_wrapped_module.")}
        torch.save({**both, "step": 3}, path / "weights.pt")
    elif layout == "CausVid":
        torch.save({"generator": as_wan(state, "model.")}, path / "weights.pt")
    elif layout == "Wan":
        save_file(as_wan(state), path / "weights.safetensors")
    elif layout == "diffusers":
        save_file(state, path / "weights.safetensors")
    return next(path.glob("weights.*"))


@pytest.mark.parametrize("layout", ["Self-Forcing", "CausVid", "Wan", "diffusers"])
def test_each_layout_gives_the_weights(layout: str, tmp_path: Path) -> None:
    pipe = other_pipeline()
    load_causal_checkpoint(pipe, saved(tmp_path, layout), block=2)
    state = pipe.transformer.state_dict()
    assert state.keys() == weights().keys() and all(torch.equal(state[k], v) for k, v in weights().items())
    assert pipe.transformer.config.num_frame_per_block == 2


@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)  # the models round their residual streams to float32
def test_it_streams_as_the_causal_model_of_the_same_weights(tmp_path: Path) -> None:
    pipe = other_pipeline()
    load_causal_checkpoint(pipe, saved(tmp_path, "Self-Forcing"), block=2, shift=3.0)
    twin = pipeline(pipe.scheduler)
    twin.register_modules(transformer=exact(SkyReelsV2Transformer3DModel, num_frame_per_block=2))
    # The two classes round their sinusoids of the time in different types.
    twin.transformer.condition_embedder.timesteps_proj = pipe.transformer.condition_embedder.timesteps_proj
    videos = []
    for each in (pipe, twin):
        with Mesh(stage=1) as mesh, parallelize(each, CascadePipeline(depth=2), mesh=mesh) as plan:
            videos.append(generate(plan, **call(FRAMES, False)).frames)
    torch.testing.assert_close(*videos, rtol=0, atol=1e-10)


def test_steps_go_to_a_clean_estimate_and_back_to_the_next_level(tmp_path: Path) -> None:
    pipe = other_pipeline()
    load_causal_checkpoint(pipe, saved(tmp_path, "Wan"))
    scheduler = pipe.scheduler
    scheduler.set_timesteps(4)
    # The published list 1000, 750, 500, 250, shifted by 5 as its code shifts it.
    wanted = [5 * level / (1 + 4 * level) for level in (1.0, 0.75, 0.5, 0.25)]
    assert scheduler.timesteps.tolist() == pytest.approx([1000 * level for level in wanted])
    sample, velocity = torch.randn(1, 4, 3, 2, 2), torch.randn(1, 4, 3, 2, 2)
    torch.manual_seed(7)
    after = scheduler.step(velocity, scheduler.timesteps[0], sample, return_dict=False)[0]
    torch.manual_seed(7)
    clean = sample - wanted[0] * velocity
    torch.testing.assert_close(after, (1 - wanted[1]) * clean + wanted[1] * torch.randn_like(sample))


class _Code:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("missing", "no checkpoint"),
        ("code", "cannot be read as a file of tensors"),
        ("text", "cannot be read as a file of tensors"),
        ("steps", "holds int under 'step', where weights are expected"),
        ("short", r"its proj_out\.bias is missing, and the pipeline's is \[16\]"),
        ("wide", r"its proj_out\.bias is \[17\], and the pipeline's is \[16\]"),
        ("more", r"its extra is \[2\], and the pipeline's is missing"),
    ],
)
def test_wrong_files_are_refused_and_change_nothing(wrong: str, words: str, tmp_path: Path, capsys: Any) -> None:
    path, pipe = tmp_path / "weights.pt", other_pipeline()
    state = weights()
    if wrong == "code":
        path.write_bytes(pickle.dumps(_Code()))
    elif wrong == "text":
        path.write_text("weights")
    elif wrong == "steps":
        torch.save({"step": 3}, path)
    elif wrong != "missing":
        bias = state.pop("proj_out.bias")
        held = {"short": {}, "wide": {"proj_out.bias": torch.zeros(17)}, "more": {"proj_out.bias": bias}}[wrong]
        torch.save(state | held | ({"extra": torch.zeros(2)} if wrong == "more" else {}), path)
    scheduler = pipe.scheduler
    with pytest.raises(ArgumentError, match=words):
        load_causal_checkpoint(pipe, path)
    assert "code ran" not in capsys.readouterr().out
    assert pipe.scheduler is scheduler and not any(bool(weight.any()) for weight in pipe.transformer.parameters())
    assert "num_frame_per_block" not in pipe.transformer.config


def test_other_models_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="takes a pipeline with one of WanTransformer3DModel, .* and dict has"):
        load_causal_checkpoint({}, "weights.pt")
    with pytest.raises(ArgumentError, match="block=0"):
        load_causal_checkpoint(other_pipeline(), "weights.pt", block=0)
