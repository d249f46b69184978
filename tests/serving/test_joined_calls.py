"""Checks calls that are made as one against the same calls made one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from torch import nn

from partsong.parallel.adapters import adapter_for
from partsong.serving.ranks.joined_calls import JoinedCalls


def _sd3() -> nn.Module:
    return SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=8, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip


def _flux() -> nn.Module:
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip


def _unet() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip


def _sd3_call(rows: int, generator: torch.Generator, side: int = 16, **more: Any) -> dict[str, Any]:
    draw = _draw(generator)
    call = {"hidden_states": draw(rows, 4, side, side), "encoder_hidden_states": draw(rows, 5, 16)}
    call |= {"pooled_projections": draw(rows, 8), "timestep": 1000 * torch.rand(1, generator=generator).expand(rows)}
    return {**call, "joint_attention_kwargs": None, "return_dict": False, **more}


def _flux_call(rows: int, generator: torch.Generator) -> dict[str, Any]:
    draw = _draw(generator)
    call = {"hidden_states": draw(rows, 6, 4), "encoder_hidden_states": draw(rows, 5, 16)}
    call |= {"pooled_projections": draw(rows, 8), "timestep": torch.rand(1, generator=generator).expand(rows)}
    places = torch.arange(18.0, dtype=torch.float64).reshape(6, 3)
    call |= {"img_ids": places, "txt_ids": torch.zeros(5, 3, dtype=torch.float64)}
    return {**call, "guidance": torch.full((rows,), 3.5, dtype=torch.float64), "return_dict": False}


def _unet_call(rows: int, generator: torch.Generator) -> dict[str, Any]:
    draw = _draw(generator)
    call = {"sample": draw(rows, 4, 8, 8), "encoder_hidden_states": draw(rows, 5, 16)}
    number = torch.randint(0, 1000, (), generator=generator)
    return {**call, "timestep": number, "added_cond_kwargs": None, "return_dict": False}


def _draw(generator: torch.Generator) -> Any:
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("build", "call"), [(_sd3, _sd3_call), (_flux, _flux_call), (_unet, _unet_call)])
@pytest.mark.parametrize("branches", [1, 2])
def test_each_part_is_what_the_call_alone_returns(build: Any, call: Any, branches: int) -> None:
    torch.manual_seed(0)
    model = build().double().eval()
    generator, nums = torch.Generator().manual_seed(1), [1, 2, 1]
    calls = [call(branches * num, generator) for num in nums]
    joined = JoinedCalls(adapter_for(model))
    shapes = {joined.shape(each, num) for each, num in zip(calls, nums, strict=True)}
    assert len(shapes) == 1
    assert None not in shapes
    with torch.no_grad():
        output = model(**joined.join(calls, nums))
        for index, each in enumerate(calls):
            alone = model(**each)[0]
            part = joined.part(output, nums, index)[0]
            assert part.shape == alone.shape
            assert (part - alone).abs().max() <= 1e-10 * alone.abs().max()


def test_the_first_branches_of_all_calls_come_first() -> None:
    joined = JoinedCalls(adapter_for(_sd3()))
    generator = torch.Generator().manual_seed(0)
    calls = [_sd3_call(2, generator), _sd3_call(4, generator)]
    whole = joined.join(calls, [1, 2])["hidden_states"]
    first, second = (call["hidden_states"] for call in calls)
    assert torch.equal(whole, torch.cat([first[:1], second[:2], first[1:], second[2:]]))


def test_other_sizes_other_branches_and_other_positions_are_not_joined() -> None:
    joined, generator = JoinedCalls(adapter_for(_sd3())), torch.Generator().manual_seed(0)
    plain = joined.shape(_sd3_call(2, generator), 1)
    assert plain == joined.shape(_sd3_call(2, generator), 1)
    assert plain != joined.shape(_sd3_call(2, generator, side=8), 1)
    assert plain != joined.shape(_sd3_call(2, generator), 2)  # two pictures without guidance
    assert plain != joined.shape(_sd3_call(2, generator, skip_layers=[1]), 1)
    flux = JoinedCalls(adapter_for(_flux()))
    moved = _flux_call(2, generator)
    moved["img_ids"] = moved["img_ids"] + 1
    assert flux.shape(_flux_call(2, generator), 1) != flux.shape(moved, 1)


def test_a_call_that_is_not_understood_stays_alone() -> None:
    joined, generator = JoinedCalls(adapter_for(_sd3())), torch.Generator().manual_seed(0)
    residuals = [torch.zeros(2, 64, 16, dtype=torch.float64)]
    assert joined.shape(_sd3_call(2, generator, block_controlnet_hidden_states=residuals), 1) is None
    assert joined.shape(_sd3_call(3, generator), 2) is None
