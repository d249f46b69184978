"""`StepCache(measure="spectral")` against its definition by numpy's FFT, its grids, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from partsong import Mesh, StepCache
from partsong.errors import UnsupportedError
from partsong.parallel import ADAPTERS, parallelize
from partsong.parallel.cuts.token_grid import token_grid
from partsong.parallel.hooks.known_values import KnownValues
from partsong.parallel.hooks.noise_levels import noise_ratios
from partsong.parallel.step_cache.spectrum import gains, tokens_to_channels
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import PIPES

STEPS = 6
#: Frames, rows and columns of tokens, and the exponent of the spectrum.
SHAPES = {"SD3": ((1, 3, 5), 2), "Flux": ((1, 3, 5), 2), "DiT": ((1, 3, 3), 2), "Wan": ((3, 3, 5), 3)}


def _kept(x: Any, noise: float, grid: tuple[int, ...], power: int) -> Any:
    """What is not noise in `[L, C]`, by the whole complex spectrum of every channel."""
    away = np.sqrt(sum(f**2 for f in np.meshgrid(*map(np.fft.fftfreq, grid), indexing="ij")))
    signal = np.maximum(away, 1e-90) ** -float(power)  # no frequency at all is all signal
    gain = signal / (signal + min(noise, 1e6) ** 2)
    gain = gain / gain.mean()
    volume = x.reshape(*grid, -1)
    return np.fft.ifftn(np.fft.fftn(volume, axes=(0, 1, 2)) * gain[..., None], axes=(0, 1, 2)).real


@pytest.mark.parametrize("name", SHAPES)
def test_changes_are_those_of_the_definition(name: str) -> None:
    case, (grid, power) = PIPES[name], SHAPES[name]
    pipe, inputs, noise = case.make(), dict[tuple[int, int], Any](), dict[int, float]()
    model = pipe.transformer
    block = (model.transformer_blocks if name != "Wan" else model.blocks)[0]
    attention = block.attn if hasattr(block, "attn") else block.attn1
    cache = StepCache(measure="spectral", threshold=0.0, warmup_steps=1, keep_last=False)
    with parallelize(pipe, cache) as plan:

        def look(module: Any, args: Any, kwargs: Any) -> None:
            tokens = args[0] if args else kwargs["hidden_states"]
            inputs[plan.clock.step, plan.clock.branch] = tokens.numpy()

        handle = attention.register_forward_pre_hook(look, with_kwargs=True)
        case.call(pipe, num_inference_steps=STEPS)
        handle.remove()
        decisions = [each for each in plan.denoisers[0].attachments[0].decisions if each.step > 0]
    if name == "DiT":
        kept = pipe.scheduler.alphas_cumprod.double().numpy()[pipe.scheduler.timesteps.numpy()]
        noise = dict(enumerate(np.sqrt((1 - kept) / kept)))
    else:
        levels = pipe.scheduler.sigmas.double().numpy()[:STEPS]
        noise = dict(enumerate(levels / np.maximum(1 - levels, 1e-300)))
    assert decisions
    for each in decisions:
        pairs = zip(*(inputs[step, each.branch] for step in (each.step, each.step - 1)), strict=True)
        for (now, before), got in zip(pairs, each.errors, strict=True):
            here, then = (_kept(x, noise[step], grid, power) for x, step in ((now, each.step), (before, each.step - 1)))
            assert got == pytest.approx(np.abs(here - then).sum() / np.abs(then).sum(), rel=1e-5)


@pytest.mark.parametrize("name", ["DiT", "Flux", "Wan"])
def test_nothing_is_left_out_at_threshold_zero(name: str) -> None:
    pipe = PIPES[name].make()
    wanted = PIPES[name].call(pipe)
    with parallelize(pipe, StepCache(measure="spectral", threshold=0.0)) as plan:
        assert torch.equal(PIPES[name].call(pipe), wanted)
        assert plan.denoisers[0].attachments[0].skipped == 0


def test_gains_have_a_mean_of_one_and_noise_leaves_the_mean_only() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    assert torch.equal(gains((1, 4, 6), 0.0, like), torch.ones(1, 4, 6, dtype=torch.float64))
    for noise in (0.5, 3.0):
        gain = gains((3, 4, 5), noise, like)
        assert float(gain.mean()) == pytest.approx(1.0)
        assert float(gain[0, 0, 0]) == float(gain.max()) > float(gain[0, 0, 1]) > float(gain[0, 2, 2])
    alone = gains((1, 4, 4), float("inf"), like)
    assert float(alone[0, 0, 0]) == pytest.approx(16.0, rel=1e-6)


def test_one_rank_has_all_channels() -> None:
    own = torch.randn(2, 7, 5)
    with Mesh() as mesh:
        assert torch.equal(tokens_to_channels(mesh.axis("ulysses"), own, (7,)), own)


def test_noise_is_what_schedulers_say() -> None:
    flow = FlowMatchEulerDiscreteScheduler()
    flow.set_timesteps(5)
    times, levels = flow.timesteps.tolist(), flow.sigmas.tolist()
    wanted = [level / (1 - level) if level < 1 else float("inf") for level in levels[:5]]
    assert noise_ratios(flow, times, levels) == wanted
    assert noise_ratios(flow, times, None) == pytest.approx(wanted, rel=1e-4)
    others: list[Any] = [EulerDiscreteScheduler(), DPMSolverMultistepScheduler()]
    for scheduler in others:
        scheduler.set_timesteps(5)
        times, levels = scheduler.timesteps.tolist(), scheduler.sigmas.tolist()
        assert noise_ratios(scheduler, times, levels) == levels[:5]
        assert noise_ratios(scheduler, times, None) == pytest.approx(levels[:5], rel=1e-2)
    steps: Any = DDIMScheduler()
    steps.set_timesteps(5)
    kept = steps.alphas_cumprod[steps.timesteps]
    wanted = ((1 - kept) / kept).sqrt().tolist()
    assert noise_ratios(steps, steps.timesteps.tolist(), None) == pytest.approx(wanted)
    assert noise_ratios(EDMEulerScheduler(), [1.0], [1.0]) is None


def test_tokens_lie_on_the_grid_that_a_call_names() -> None:
    def ids(*numbers: tuple[int, int, int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32)

    picture = [(0, row, column) for row in range(2) for column in range(3)]
    flux, ltx, qwen, video = (
        ADAPTERS[f"{name}Transformer{kind}Model"]
        for name, kind in (("Flux", "2D"), ("LTXVideo", "3D"), ("QwenImage", "2D"), ("CogVideoX", "3D"))
    )
    packed = {"hidden_states": torch.zeros(1, 6, 4)}

    def read(adapter: Any, named: dict[str, Any], config: Any = None) -> Any:
        return token_grid(adapter, config or {}, packed | named, KnownValues())

    assert read(flux, {"img_ids": ids(*picture)}) == ((1, 2, 3), 6)
    beside = [(1, row, column) for row in range(2) for column in range(2)]
    assert read(flux, {"img_ids": ids(*picture, *beside)}) == ((1, 2, 3), 10)
    assert read(qwen, {"img_shapes": [[(1, 2, 3), (1, 4, 4)]]}) == ((1, 2, 3), 22)
    sides = {"num_frames": 3, "height": 2, "width": 5}
    assert read(ltx, sides) == ((3, 2, 5), 30)
    frames, patches = {"hidden_states": torch.zeros(1, 3, 4, 8, 6)}, {"patch_size": 2, "patch_size_t": None}
    assert read(video, frames, patches) == ((3, 4, 3), 36)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (flux, {"img_ids": ids(*reversed(picture))}, "row after row"),
        (flux, {"img_ids": ids(*picture[:5])}, "row after row"),
        (flux, {}, "row after row"),
        (ltx, sides | {"width": None}, "row after row"),
        (video, {"hidden_states": torch.zeros(1, 3, 4, 7, 6)}, "no whole number of patches"),
        (ADAPTERS["SanaTransformer2DModel"], {}, "does not say how its tokens lie"),
    ]
    for adapter, named, why in refused:
        with pytest.raises(UnsupportedError, match=why):
            read(adapter, named, patches)


def test_what_has_no_spectrum_is_refused() -> None:
    model = FAMILIES["DiT"].model(8, torch.float64)
    with (
        torch.no_grad(),
        parallelize(model, StepCache(measure="spectral")),
        pytest.raises(UnsupportedError, match="no scheduler says"),
    ):
        model(**FAMILIES["DiT"].call(8, 2, torch.float64))
    with pytest.raises(UnsupportedError, match="text and picture as one"):
        parallelize(FAMILIES["Lumina2"].model(8, torch.float64), StepCache(measure="spectral"))
